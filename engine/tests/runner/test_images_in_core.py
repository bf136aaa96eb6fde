"""Images through scheduler, cache and runner: tokens and log-probabilities are transformers', alone and in a crowd that is
chunked, cached, preempted and planned ahead."""

import itertools

import msgspec
import pytest
import torch
import transformers
from test_core_with_runner import Engine
from test_tensor_parallel_core import DividedEngine, build_executor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from vision_models import IMAGE_TOKEN, TOKENS, make_llava, picture

from penstock.engine.config import CacheConfig, EngineConfig, LoraConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig
from penstock.engine.core.plan import SampleInputs
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.messages import AddRequest
from penstock.engine.multimodal.clip import clip_pixels
from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.sampling import SamplingParams
from penstock.prompt.hashing import PromptItem

OUTPUTS = 30
SCHEDULER = SchedulerConfig(
    max_num_seqs=6, max_num_batched_tokens=64, watermark=0.0, max_encoder_tokens=64, encoder_cache_size=4 * TOKENS
)
# By request: tokens, and the images among them by their seeds.
LAYOUTS = [
    [3, [0], 5],
    [3, [0], 9],
    [3, [1], 5],
    [20, [2], 1, [0], 4],
    [[3], 2],
    [40],
    [1, [4], [4], 6],
    [17, [5], 30, [6], 3, [0], 8],
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("models") / "images")


@pytest.fixture(scope="module")
def reference(path):
    return transformers.LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def build(path, build_runner):
    def make(depth=1, blocks=200, **options):
        options.setdefault("scheduler", SCHEDULER)
        return Engine(build_runner(path, **options), depth, blocks)

    return make


def request(index: int, layout: list, settings, first: int = 0, **sampling) -> AddRequest:
    """A prompt whose text begins alike in all, so that prefixes are shared as far as the images allow."""
    tokens, images = [], []
    text = itertools.cycle(range(first, IMAGE_TOKEN, 3))
    for part in layout:
        if isinstance(part, list):
            pixels = clip_pixels(picture(part[0]), settings.clip)
            images.append(ImageInput(PromptItem(f"image {part[0]}", len(tokens), TOKENS), pixels))
            tokens += [IMAGE_TOKEN] * TOKENS
        else:
            tokens += itertools.islice(text, part)
    params = SamplingParams(max_tokens=OUTPUTS, temperature=0.0, logprobs=0, **sampling)
    return AddRequest(index, f"r{index}", tokens, params, float(index), images=images)


@pytest.fixture(scope="module")
def expected(path, reference):
    """By layout, what transformers generates, and the log-probabilities."""
    processor = CLIPImageProcessorPil.from_pretrained(path)
    found = {}
    for at, layout in enumerate(LAYOUTS):
        seeds = [part[0] for part in layout if isinstance(part, list)]
        pixels = dict(processor([picture(seed) for seed in seeds], return_tensors="pt")) if seeds else {}
        [prompt] = [request(at, layout, SETTINGS[0]).prompt_token_ids]
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([prompt]),
                **pixels,
                max_new_tokens=OUTPUTS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = out.sequences[0, len(prompt) :].tolist()
        scores = torch.log_softmax(torch.cat(out.logits), -1)[range(OUTPUTS), tokens].tolist()
        found[at] = tokens, scores
    return found


SETTINGS: list = []


@pytest.fixture(scope="module", autouse=True)
def settings(path):
    SETTINGS[:] = [read_model_config(path, served_names=()).images]
    return SETTINGS[0]


def check(engine, batch, expected):
    outputs = engine.run(batch)
    for one in batch:
        tokens, scores = expected[one.index]
        assert outputs[one.index] == tokens, one.index
        assert engine.logprobs[one.index] == pytest.approx(scores, abs=2e-4)


@pytest.mark.req("MM-01", "MM-06", "MM-07", "MM-20")
@pytest.mark.parametrize("budget", [64, 7])
def test_alone_and_in_chunks(build, settings, expected, budget):
    engine = build(scheduler=msgspec.structs.replace(SCHEDULER, max_num_batched_tokens=budget))
    for at, layout in enumerate(LAYOUTS):
        check(engine, [request(at, layout, settings)], expected)
    encoder = engine.core.scheduler.encoder
    assert encoder.num_runs >= 7
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(LAYOUTS), "the images make no difference"


@pytest.mark.parametrize(("depth", "blocks"), [(1, 200), (2, 200), (1, 21), (2, 21)])
def test_in_a_crowd_that_is_cached_preempted_and_planned_ahead(build, settings, expected, depth, blocks):
    engine = build(depth=depth, blocks=blocks)
    batch = [request(at, layout, settings) for at, layout in enumerate(LAYOUTS)]
    check(engine, batch, expected)
    assert (engine.core.scheduler.totals.num_preemptions > 0) == (blocks == 21)
    runs = engine.core.scheduler.encoder.num_runs
    engine.logprobs.clear()
    check(engine, batch, expected)
    if blocks == 200:  # every block that holds an image is found again, but for those of one that ends its prompt
        assert engine.core.scheduler.totals.prefix_hits > 0
        assert engine.core.scheduler.encoder.num_runs - runs <= 2
    assert engine.runner._images.names == set(engine.core.scheduler.encoder.cache._lengths)


def test_drafts_are_accepted_and_change_nothing(build, settings, expected):
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
    scheduler = msgspec.structs.replace(SCHEDULER, num_speculative_tokens=3)
    engine = build(scheduler=scheduler, speculative=speculative)
    check(engine, [request(at, layout, settings) for at, layout in enumerate(LAYOUTS)], expected)


def test_adapters_are_for_the_decoder_alone(build, settings, expected):
    engine = build(lora=LoraConfig())
    assert all(name.startswith("language_model.") for name in engine.runner._lora._targets)
    check(engine, [request(at, layout, settings) for at, layout in enumerate(LAYOUTS[:4])], expected)


def test_prompt_logprobs_see_the_images(build, settings, reference, path):
    engine = build()
    one = request(0, LAYOUTS[0], settings, prompt_logprobs=0)
    engine.run([one])
    processor = CLIPImageProcessorPil.from_pretrained(path)
    pixels = processor(picture(0), return_tensors="pt")["pixel_values"]
    ids = torch.tensor([one.prompt_token_ids])
    with torch.inference_mode():
        logits = reference(input_ids=ids, pixel_values=pixels).logits
    scores = torch.log_softmax(logits[0], -1)
    for position in range(1, len(one.prompt_token_ids)):
        token = one.prompt_token_ids[position]
        assert engine.scores[0][position] == pytest.approx(float(scores[position - 1, token]), abs=2e-4)


def test_embeddings_of_another_number_than_placeholders_are_that_requests_error(build_runner, driver, path, settings):
    runner = build_runner(path, scheduler=SCHEDULER)
    play = driver(runner)
    sound, wrong = play.admit(list(range(20))), play.admit([IMAGE_TOKEN] * 30)
    pixels = clip_pixels(picture(0), settings.clip)
    plan = play.plan([(sound, 20), (wrong, 30)])
    from penstock.engine.multimodal.inputs import EncoderRun

    admissions = [plan.admissions[0], msgspec.structs.replace(plan.admissions[1], items=(PromptItem("a", 2, TOKENS + 1),))]
    plan = msgspec.structs.replace(plan, admissions=admissions, encoder_runs=[EncoderRun("a", pixels)])
    runner.execute(plan)
    result = runner.sample(SampleInputs(plan.step_id))
    assert list(result.failed) == [1]
    assert f"needs {TOKENS + 1} embeddings, and it has {TOKENS}" in result.failed[1]
    assert result.counts[0] == 1


def test_sleep_and_new_weights_drop_embeddings(build, settings, expected):
    engine = build()
    batch = [request(0, LAYOUTS[0], settings)]
    check(engine, batch, expected)
    controls = engine.core._controls
    engine.runner.sleep(1)
    controls._scheduler.encoder.cache.clear()
    assert not engine.runner._images.names
    engine.runner.wake_up(["kv_cache"])
    engine.core.scheduler.kv.reset()
    engine.logprobs.clear()
    check(engine, batch, expected)
    assert engine.core.scheduler.encoder.num_runs == 2


def test_the_memory_of_images_is_counted(build_runner, path):
    with_images = build_runner(path, scheduler=SCHEDULER).profile_memory()
    plain = msgspec.structs.replace(SCHEDULER, encoder_cache_size=0)
    assert with_images - build_runner(path, scheduler=plain).profile_memory() == 4 * TOKENS * 64 * 4


def test_ranks_divide_the_decoder_and_each_has_the_tower(settings, expected, path):
    config = EngineConfig(
        model=read_model_config(path, served_names=(), dtype="float32", max_model_len=320),
        cache=CacheConfig(block_size=16, num_blocks=200),
        scheduler=SCHEDULER,
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    executor, _ = build_executor(config)
    try:
        engine = DividedEngine(config, executor, 200)
        outputs = engine.run([request(at, layout, settings) for at, layout in enumerate(LAYOUTS)])
    finally:
        executor.close()
    assert outputs == {at: tokens for at, (tokens, _) in expected.items()}
    stats = engine.core.stats().encoder
    assert stats.encoded >= 7
    assert stats.seconds > 0
