"""Images through scheduler, cache and runner: tokens and log-probabilities are transformers', alone and in a crowd that is
chunked, cached, preempted and planned ahead."""

import functools
import itertools
import json
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from draft_heads import ReferenceHead, Told, save_head
from PIL import Image
from stages_here import Stages
from test_core_with_runner import Engine
from test_draft_model import K, drafts_pay
from test_drafts_in_core import Watched
from test_offload_in_core import Engine as Offloading
from test_pipeline_parallel import StagedEngine
from test_tensor_parallel_core import DividedEngine, build_executor
from vision_models import IMAGE_TOKEN, QWEN3_MOE, SEEING

from penstock.engine.args import EngineArgs
from penstock.engine.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    LoraConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from penstock.engine.core.plan import SampleInputs
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.messages import AbortRequests, AddRequest, FinishReason
from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.multimodal.resize import resized
from penstock.engine.runner.draft_model import DraftModel
from penstock.engine.runner.images import whole
from penstock.engine.runner.memory_profile import PeakMemory
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.depth import DraftDepth
from penstock.prompt.hashing import PromptItem

OUTPUTS, SHORT = 30, 6
SCHEDULER = SchedulerConfig(
    max_num_seqs=6, max_num_batched_tokens=64, watermark=0.0, max_encoder_tokens=64, encoder_cache_size=100
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


@pytest.fixture(scope="module", params=SEEING)
def family(request):
    return SEEING[request.param]


@pytest.fixture(scope="module")
def path(family, tmp_path_factory):
    return family.make(tmp_path_factory.mktemp("models") / "images")


@pytest.fixture(scope="module")
def reference(family, path):
    return family.reference(path)


@pytest.fixture(scope="module")
def settings(path):
    return read_model_config(path, served_names=()).images


@pytest.fixture(scope="module")
def scheduler(settings):
    return msgspec.structs.replace(SCHEDULER, whole_images=settings.two_way)


@pytest.fixture(scope="module")
def build(path, build_runner, scheduler):
    def make(depth=1, blocks=200, of=Engine, **options):
        options.setdefault("scheduler", scheduler)
        return of(build_runner(path, **options), depth, blocks)

    return make


@pytest.fixture(scope="module")
def request_of(family, settings):
    """A request of a layout; its index, and fields of its sampling."""
    return functools.partial(make_request, family, settings)


def make_request(family, settings, index: int, layout: list, first: int = 0, **sampling) -> AddRequest:
    """A prompt whose text begins alike in all, so that prefixes are shared as far as the images allow."""
    tokens, images = [], []
    text = itertools.cycle(range(first, IMAGE_TOKEN, 3))
    for part in layout:
        if isinstance(part, list):
            if images and images[-1].end == len(tokens) and settings.two_way | (settings.grid(1, 1) is not None):
                tokens.append(next(text))  # transformers takes neighbours for one image; prompts have words between them
            pixels = resized(family.picture(part[0]), settings.resize)
            grid = settings.grid(pixels.height, pixels.width)
            length = settings.tokens_of(pixels)
            images.append(ImageInput(PromptItem(f"image {part[0]}", len(tokens), length), pixels, grid))
            tokens += [IMAGE_TOKEN] * length
        else:
            tokens += itertools.islice(text, part)
    params = SamplingParams(max_tokens=OUTPUTS, temperature=0.0, logprobs=0, **sampling)
    return AddRequest(index, f"r{index}", tokens, params, float(index), images=images)


def shortened(request: AddRequest) -> AddRequest:
    """The same with fewer tokens to generate, where each takes long."""
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=SHORT))


@pytest.fixture(scope="module")
def expected(family, path, reference, request_of):
    """By layout."""
    say = functools.partial(said, family, family.processor(path), reference)
    return {at: say(layout, request_of(at, layout).prompt_token_ids) for at, layout in enumerate(LAYOUTS)}


def said(family, processor, reference, layout: list, prompt: list[int]) -> tuple[list[int], list[float]]:
    """What transformers generates for a layout, and the log-probabilities."""
    pictures = [family.picture(part[0]) for part in layout if isinstance(part, list)]
    with torch.inference_mode():
        out = reference.generate(
            **family.inputs(processor, pictures, prompt),
            max_new_tokens=OUTPUTS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[0, len(prompt) :].tolist()
    return tokens, torch.log_softmax(torch.cat(out.logits), -1)[range(OUTPUTS), tokens].tolist()


def check(engine, batch, expected):
    outputs = engine.run(batch)
    for one in batch:
        tokens, scores = expected[one.index]
        assert outputs[one.index] == tokens, one.index
        assert engine.logprobs[one.index] == pytest.approx(scores, abs=2e-4)


@pytest.mark.slow
@pytest.mark.req("MM-01", "MM-06", "MM-07", "MM-20")
@pytest.mark.parametrize(("budget", "tower"), [(64, 64), (9, 5)])
def test_alone_and_in_chunks(build, request_of, scheduler, expected, budget, tower):
    """Of prompts, and of the tower's runs."""
    engine = build(scheduler=msgspec.structs.replace(scheduler, max_num_batched_tokens=budget, max_encoder_tokens=tower))
    for at, layout in enumerate(LAYOUTS):
        check(engine, [request_of(at, layout)], expected)
    encoder = engine.core.scheduler.encoder
    assert encoder.num_runs >= 7
    different = {(tuple(tokens), round(scores[0], 2)) for tokens, scores in expected.values()}
    assert len(different) == len(LAYOUTS), "the images make no difference"


@pytest.mark.slow
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_in_a_crowd_that_is_cached_preempted_and_planned_ahead(build, settings, request_of, expected, depth, tight):
    # Little more than one sequence of full length: Gemma's needs blocks for two kinds of layers.
    engine = build(depth=depth, blocks=(31 if settings.two_way else 21) if tight else 200)
    batch = [request_of(at, layout) for at, layout in enumerate(LAYOUTS)]
    check(engine, batch, expected)
    assert (engine.core.scheduler.totals.num_preemptions > 0) == tight
    runs = engine.core.scheduler.encoder.num_runs
    engine.logprobs.clear()
    check(engine, batch, expected)
    if not tight:  # every block that holds an image is found again, but for those of one that ends its prompt
        assert engine.core.scheduler.totals.prefix_hits > 0
        assert engine.core.scheduler.encoder.num_runs - runs <= 2
    made = {name: len(found) for name, found in engine.runner._images._embeddings.items()}
    assert made == engine.core.scheduler.encoder.cache._lengths


def test_a_run_goes_on_without_the_request_that_has_gone(build, family, request_of, scheduler, expected):
    """In the runner as the scheduler says: the next request for the image gets its embeddings, which were made once."""
    if family is not SEEING["qwen3_vl"]:
        pytest.skip("runs are divided alike, whatever the family")
    engine = build(scheduler=msgspec.structs.replace(scheduler, max_encoder_tokens=3))
    engine.core.handle(request_of(0, LAYOUTS[0]))
    engine.core.step()
    assert engine.runner._images._under_way
    engine.core.handle(AbortRequests([0]))
    assert [one.reason for one in engine.core.step().finished] == [FinishReason.ABORT]
    assert engine.runner._images._under_way, "the run was over before the request had gone"
    check(engine, [request_of(1, LAYOUTS[1])], expected)
    encoder = engine.core.scheduler.encoder
    assert (encoder.num_runs, encoder.cache.held) == (1, 0)
    assert engine.runner._images.names == set(encoder.cache._lengths) == {"image 0"}
    assert not engine.runner._images._under_way


def test_images_come_back_from_the_hosts_memory(family, path, build_runner, scheduler, request_of, expected):
    """Of prompts that have left the cache, each with its own image's keys and values, and without the tower."""
    if family is not SEEING["qwen3_vl"]:
        pytest.skip("pages hold what decoders write, whatever the family")
    runner = build_runner(path, scheduler=msgspec.structs.replace(scheduler, encoder_cache_size=40))
    engine = Offloading(runner, 1, 21, 400)
    # The first three begin alike, and have equal placeholders there.
    batch = [shortened(request_of(at, layout)) for at, layout in enumerate(LAYOUTS)]
    short = {at: expected[at][0][:SHORT] for at in expected}
    try:
        assert engine.run(batch) == short
        engine.run([shortened(request_of(9, [300], first=1))])  # takes the cache for itself
        loaded, runs = engine.core.stats().offload.memory.loaded_bytes, engine.core.scheduler.encoder.num_runs
        assert engine.run(batch) == short
        assert engine.core.stats().offload.memory.loaded_bytes > loaded
        assert engine.core.scheduler.encoder.num_runs < 2 * runs
    finally:
        engine.core.close()


def test_drafts_are_accepted_and_change_nothing(build, request_of, scheduler, expected):
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
    engine = build(scheduler=msgspec.structs.replace(scheduler, num_speculative_tokens=3), speculative=speculative)
    check(engine, [request_of(at, layout) for at, layout in enumerate(LAYOUTS)], expected)


@pytest.fixture
def staged(path, scheduler, monkeypatch):
    """An engine whose layers are in stages, with drafts that always pay."""

    def make(count: int, **speculative: Any) -> StagedEngine:
        drafts_pay(monkeypatch)
        limits = {"num_speculative_tokens": K, "num_lookahead_tokens": K, "max_num_batched_tokens": 20, "pipeline_stages": count}
        config = EngineConfig(
            model=read_model_config(path, served_names=(), dtype="float32", max_model_len=320),
            cache=CacheConfig(block_size=16),
            scheduler=msgspec.structs.replace(scheduler, **limits, image_lookahead=int("eagle" in speculative["method"])),
            parallel=ParallelConfig(pipeline_parallel_size=count),
            speculative=SpeculativeConfig(num_speculative_tokens=K, **speculative),
            depth=count,
        )
        return StagedEngine(config, Stages(config))

    return make


@pytest.mark.req("MM-26", "DX-09")
@pytest.mark.parametrize("in_stages", [False, True])
def test_a_head_sees_images_and_drafts_what_plain_torch_does(
    build, staged, request_of, scheduler, expected, family, reference, path, monkeypatch, tmp_path, in_stages
):
    """Through chunks that end before an image and within it. In the last stage of a pipeline with embeddings from the first one,
    which come through a stage between, and beside what is added to layers."""
    if family not in (SEEING["llava"], SEEING["qwen2_5_vl"], SEEING["qwen3_vl"]) or (
        in_stages and family is SEEING["qwen2_5_vl"]
    ):
        pytest.skip("a head reads the decoder's states: it matters whether the decoder's positions are one a token or three")
    head = ReferenceHead(eagle3=False)
    folder = save_head(tmp_path / "head", head.tensors())
    speculative = SpeculativeConfig(method="eagle", num_speculative_tokens=K, model=folder)
    limits = {"num_speculative_tokens": K, "num_lookahead_tokens": K, "max_num_batched_tokens": 20, "image_lookahead": 1}
    drafts_pay(monkeypatch)
    told = Told(monkeypatch)
    if in_stages:
        engine = staged(3 if family is SEEING["qwen3_vl"] else 2, method="eagle", model=folder)
    else:
        engine = build(scheduler=msgspec.structs.replace(scheduler, **limits), speculative=speculative)
    told.seen.clear()
    check(engine, [request_of(3, LAYOUTS[3])], expected)
    told.seen.clear()
    # transformers takes no placeholder in an answer, where there is no image.
    request = request_of(3, LAYOUTS[3])
    without = msgspec.structs.replace(request.sampling, logit_bias=((IMAGE_TOKEN, -100.0),))
    engine.run([msgspec.structs.replace(request, sampling=without)])
    pictures = [family.picture(part[0]) for part in LAYOUTS[3] if isinstance(part, list)]
    processor = family.processor(path)
    with torch.inference_mode():
        embeddings = torch.cat(list(reference.get_image_features(**processor(pictures, return_tensors="pt")).pooler_output))

    def target(ids, **options):
        return reference(**family.inputs(processor, pictures, ids[0].tolist()), **options)

    target.lm_head, seeing, blind = reference.lm_head, SeeingEmbedding(head.embed_tokens, embeddings), head.embed_tokens
    seen = told.seen[:12]
    drafts = {}
    for embedding in (seeing, blind):
        head.embed_tokens = embedding
        drafts[embedding] = [head.drafts(target, known, K) for known, _ in seen]
    assert [drafts for _, drafts in seen] == [found for found, _ in drafts[seeing]]
    assert drafts[seeing] != drafts[blind], "the images make no difference"


def test_a_head_for_positions_in_rows_and_columns_is_refused(family, path, tmp_path):
    if family is not SEEING["qwen2_5_vl"]:
        pytest.skip("its images alone have such positions here")
    folder = save_head(tmp_path / "head", ReferenceHead(eagle3=False).tensors())
    given: dict[str, Any] = {"model": str(path), "device": "cpu", "max_model_len": 320}
    given |= {"speculative_config": {"method": "eagle", "model": str(folder), "num_speculative_tokens": K}}
    assert EngineArgs(**given).config().model.images is not None
    rows_and_columns = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    save_head(folder, ReferenceHead(eagle3=False).tensors(), rope_parameters=rows_and_columns)
    with pytest.raises(ConfigError, match="this head takes the positions of images in rows and columns"):
        EngineArgs(**given).config()
    EngineArgs(**given, limit_mm_per_prompt={"image": 0}).config()


@pytest.fixture
def drafting(build, scheduler, monkeypatch):
    """An engine with a draft model, whose drafts always pay."""

    def make(draft, **limits):
        drafts_pay(monkeypatch)
        speculative = SpeculativeConfig(method="draft_model", num_speculative_tokens=K, model=draft)
        limits |= {"num_speculative_tokens": K, "num_lookahead_tokens": K}
        return build(of=Watched, scheduler=msgspec.structs.replace(scheduler, **limits), speculative=speculative)

    return make


def test_a_draft_model_sees_what_the_model_does(family, drafting, request_of, expected, path, monkeypatch):
    """As its own draft model, the target is always right: through chunks, prefix hits, and embeddings that are dropped as soon as
    another image needs their room."""
    if family in (SEEING["llava_next"], SEEING["qwen2_5_vl"]):
        pytest.skip("the others have what these have: a square, two-way attention, positions in rows and columns")
    engine = drafting(path, max_num_batched_tokens=30, encoder_cache_size=40)
    # What the runner fills rows up with is no draft of the model's.
    monkeypatch.setattr(
        DraftDepth, "observe", lambda _, rows, drafted, accepted, *others: judged.append((drafted.sum(), accepted.sum()))
    )
    judged: list[tuple[int, int]] = []
    batch = [shortened(request_of(at, layout)) for at, layout in enumerate(LAYOUTS)]
    expected = {at: [found[:SHORT] for found in expected[at]] for at in expected}
    for _ in range(2):
        check(engine, batch, expected)
        engine.logprobs.clear()
    assert engine.core.scheduler.totals.prefix_hits > 0
    assert engine.core.scheduler.encoder.num_runs > 7, "no embeddings were dropped"
    drafted, accepted = np.sum(judged, axis=0)
    assert accepted == drafted > 30
    assert engine.runner._draft_images.names == engine.runner._images.names
    engine.runner.sleep(1)
    assert not engine.runner._draft_images.names


def test_a_draft_model_reads_no_image_again_to_keep_rows_alike(family, path, drafting, request_of, monkeypatch):
    """The image of the first request has a step of its own. The next step reads that request's text, a longer prompt, and an
    image that takes the room of these embeddings."""
    if family is not SEEING["llava"]:
        pytest.skip("rows are made alike by their tokens, whatever the family")
    engine = drafting(path, max_num_batched_tokens=family.tokens, encoder_cache_size=family.tokens)
    gone: list[bool] = []
    propose = DraftModel.propose
    monkeypatch.setattr(
        DraftModel,
        "propose",
        lambda *given: gone.append("image 0" not in engine.runner._draft_images.names) or propose(*given),
    )
    engine.run([shortened(request_of(at, layout)) for at, layout in enumerate([[[0], 1], [K], [[1], 40]])])
    assert gone[0], "the image would have been read again without harm"
    assert engine.accepted == engine.drafted > 10


def test_a_draft_model_without_a_tower_reads_placeholders(family, path, drafting, request_of, expected, checkpoint, caplog):
    if family is not SEEING["llava"]:
        pytest.skip("a draft model of text is the same for all")
    draft = checkpoint("llama")
    engine = drafting(draft)
    check(engine, [request_of(at, LAYOUTS[at]) for at in (3, 6)], expected)
    assert engine.drafted > engine.accepted and engine.runner._draft_images is None
    with caplog.at_level("INFO"):
        EngineArgs(model=str(path), device="cpu", spec_model=str(draft), spec_tokens=K).config()
    assert "reads placeholders in the places of images" in caplog.text


def test_a_draft_model_that_makes_other_embeddings_is_refused(family, path, tmp_path):
    if family is not SEEING["qwen2_5_vl"]:
        pytest.skip("a family's draft models differ in few ways")
    given: dict[str, Any] = {"model": str(path), "device": "cpu", "spec_tokens": K}
    same = EngineArgs(**given, spec_model=str(path)).config()
    alone = EngineArgs(**given, spec_method="ngram").config()
    # Two equal models with two equal towers: the step that a run fills has as many tokens as without the draft model.
    assert same.model.images.cost == pytest.approx(alone.model.images.cost)
    other = family.make(tmp_path / "draft", vision={"patch_size": 6})
    settings = json.loads((other / "preprocessor_config.json").read_text()) | {"patch_size": 6}
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="it reads images in another way than the model"):
        EngineArgs(**given, spec_model=str(other)).config()
    EngineArgs(**given, spec_model=str(other), limit_mm_per_prompt={"image": 0}).config()


class SeeingEmbedding(torch.nn.Module):
    """Of tokens, and of images [n, hidden] in the places of theirs."""

    def __init__(self, tokens: torch.nn.Module, images: torch.Tensor) -> None:
        super().__init__()
        self.tokens, self.images = tokens, images

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.tokens(ids).clone()
        places = (ids == IMAGE_TOKEN).nonzero()[: len(self.images)]  # a draft may be such a token, too
        found[tuple(places.T)] = self.images
        return found


def test_adapters_are_for_the_decoder_alone(build, request_of, expected):
    engine = build(lora=LoraConfig())
    assert not any(name.startswith(("visual.", "vision_tower.", "multi_modal")) for name in engine.runner._lora._targets)
    check(engine, [request_of(at, layout) for at, layout in enumerate(LAYOUTS[:4])], expected)


def test_prompt_logprobs_see_the_images(build, request_of, family, reference, path):
    engine = build()
    one = request_of(0, LAYOUTS[0], prompt_logprobs=0)
    engine.run([one])
    with torch.inference_mode():
        logits = reference(**family.inputs(family.processor(path), [family.picture(0)], one.prompt_token_ids)).logits
    scores = torch.log_softmax(logits[0], -1)
    for position in range(1, len(one.prompt_token_ids)):
        token = one.prompt_token_ids[position]
        assert engine.scores[0][position] == pytest.approx(float(scores[position - 1, token]), abs=2e-4)


def test_embeddings_of_another_number_than_placeholders_are_that_requests_error(
    build_runner, driver, path, family, settings, scheduler
):
    play = driver(runner := build_runner(path, scheduler=scheduler))
    sound, wrong = play.admit(list(range(20))), play.admit([IMAGE_TOKEN] * 30)
    pixels = resized(family.picture(0), settings.resize)
    length = settings.tokens_of(pixels)
    plan = play.plan([(sound, 20), (wrong, 30)])
    from penstock.engine.multimodal.inputs import EncoderRun

    admissions = [plan.admissions[0], msgspec.structs.replace(plan.admissions[1], items=(PromptItem("a", 2, length + 1),))]
    plan = msgspec.structs.replace(plan, admissions=admissions, encoder_runs=[EncoderRun("a", pixels, length, length)])
    runner.execute(plan)
    result = runner.sample(SampleInputs(plan.step_id))
    assert list(result.failed) == [1]
    assert f"needs {length + 1} embeddings, and it has {length}" in result.failed[1]
    assert result.counts[0] == 1


def test_sleep_and_new_weights_drop_embeddings(build, request_of, expected):
    engine = build()
    batch = [request_of(0, LAYOUTS[0])]
    check(engine, batch, expected)
    controls = engine.core._controls
    engine.runner.sleep(1)
    controls._scheduler.encoder.clear()
    assert not engine.runner._images.names
    engine.runner.wake_up(["kv_cache"])
    engine.core.scheduler.kv.reset()
    engine.logprobs.clear()
    check(engine, batch, expected)
    assert engine.core.scheduler.encoder.num_runs == 2


@pytest.mark.req("MM-23")
def test_the_memory_of_images_is_counted(build_runner, path, family, settings):
    """Of a full cache, and of the tower for the largest image, though a smaller one is measured."""
    runner = build_runner(path, scheduler=SCHEDULER)
    shapes = [Image.new("RGB", (width, height)) for width, height in ((16, 16), (12, 76), (76, 12), (32, 40))]
    pixels = max((resized(image, settings.resize) for image in shapes), key=settings.tokens_of)
    with torch.inference_mode(), PeakMemory() as memory:
        assert len(whole(runner._images.encoding(pixels))) == settings.tokens
    assert len(runner._images.blank()) < settings.tokens or family.tokens
    assert memory.peak <= runner._images.bytes(0)
    with_images = runner.profile_memory()
    plain = msgspec.structs.replace(SCHEDULER, encoder_cache_size=0)
    assert with_images - build_runner(path, scheduler=plain).profile_memory() == 100 * runner._images.blank()[0].nbytes


def test_ranks_divide_the_decoder_and_each_has_the_tower(family, request_of, scheduler, expected, path):
    if family is SEEING["llava"]:
        pytest.skip("its decoder is that of llava_next, and no rank divides a tower")
    config = EngineConfig(
        model=read_model_config(path, served_names=(), dtype="float32", max_model_len=320),
        cache=CacheConfig(block_size=16, num_blocks=200),
        scheduler=scheduler,
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    executor, _ = build_executor(config)
    try:
        engine = DividedEngine(config, executor, 200)
        outputs = engine.run([shortened(request_of(at, LAYOUTS[at])) for at in (3, 6, 7)])
    finally:
        executor.close()
    assert outputs == {at: expected[at][0][:SHORT] for at in (3, 6, 7)}
    stats = engine.core.stats().encoder
    assert stats.encoded == 5
    assert stats.seconds > 0


@pytest.mark.req("DX-09")
def test_the_first_stage_of_a_pipeline_has_the_tower(family, path, scheduler, request_of, expected):
    """Later stages know where images are, get what DeepStack adds to their layers, and read none of the tower's weights."""
    count = 3 if family is SEEING["qwen3_vl"] else 2  # the second of three has the second layer to which features are added
    config = EngineConfig(
        model=read_model_config(path, served_names=(), dtype="float32", max_model_len=320),
        cache=CacheConfig(block_size=16),
        scheduler=msgspec.structs.replace(scheduler, pipeline_stages=count),
        parallel=ParallelConfig(pipeline_parallel_size=count),
        lora=LoraConfig(),
        depth=count,
    )
    stages = Stages(config)
    engine = StagedEngine(config, stages)
    found = engine.run([shortened(request_of(at, LAYOUTS[at])) for at in (3, 6, 7)])
    assert found == {at: expected[at][0][:SHORT] for at in (3, 6, 7)}
    assert engine.core.stats().encoder.encoded == 5
    towers = [[name for name in runner.model.weights() if name.startswith(("vis", "multi"))] for runner in stages.runners]
    assert towers[0] and not any(towers[1:])
    args = EngineArgs(model=str(path), device="cpu", pipeline_parallel_size=2, max_num_seqs=4, max_model_len=320)
    assert args.config().model.images is not None
    drafting = msgspec.structs.replace(args, spec_method="draft_model", spec_model=str(path)).config()
    assert drafting.depth == 2 and drafting.speculative is not None


@pytest.mark.req("DX-09")
def test_a_draft_model_in_the_last_stage_has_a_tower_of_its_own(staged, request_of, family, path, expected, monkeypatch):
    """As its own draft model, the target is always right: with other pixels, or none, it would not be."""
    if family not in (SEEING["llava"], SEEING["qwen3_vl"]):
        pytest.skip("the others have what these have")
    judged: list[tuple[int, int]] = []
    observe = lambda _, rows, drafted, accepted, *others: judged.append((drafted.sum(), accepted.sum()))  # noqa: E731
    monkeypatch.setattr(DraftDepth, "observe", observe)
    engine = staged(2, method="draft_model", model=path)
    check(engine, [request_of(at, LAYOUTS[at]) for at in (0, 3)], expected)
    drafted, accepted = np.sum(judged, axis=0)
    assert accepted == drafted > 30
    first, last = engine.executor.runners
    assert first._images.names == last._draft_images.names and not last._images.names


def test_pages_on_a_disk_are_not_found_where_images_are_read_in_another_size(build_runner, path, settings):
    def pages(images):
        runner = build_runner(path, scheduler=SCHEDULER)
        runner.config = msgspec.structs.replace(runner.config, model=msgspec.structs.replace(runner.config.model, images=images))
        return runner._namespace().identity

    other = msgspec.structs.replace(settings, normalization=msgspec.structs.replace(settings.normalization, factor=0.5))
    assert pages(settings) == pages(settings)
    assert pages(other) != pages(settings) != pages(None)


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_a_decoder_with_experts_sees_images(build_runner, tmp_path, turned):
    """In files that transformers has written, and in those of the Hub, whose experts have inputs before outputs."""
    family, path = QWEN3_MOE, QWEN3_MOE.make(tmp_path / "experts")
    request = make_request(family, read_model_config(path, served_names=()).images, 0, LAYOUTS[3])
    expected = {0: said(family, family.processor(path), family.reference(path), LAYOUTS[3], request.prompt_token_ids)}
    if turned:
        tensors = safetensors.torch.load_file(path / "model.safetensors")
        experts = {name: value.transpose(1, 2).contiguous() for name, value in tensors.items() if ".mlp.experts." in name}
        assert experts
        safetensors.torch.save_file(tensors | experts, path / "model.safetensors")
    chunks = msgspec.structs.replace(SCHEDULER, max_num_batched_tokens=20)
    check(Engine(build_runner(path, scheduler=chunks), 1, 200), [request], expected)
