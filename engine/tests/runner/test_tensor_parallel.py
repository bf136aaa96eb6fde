"""Every family divided among ranks in processes of their own: the answers of one rank, and the same bits in any batch."""

import gc
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedding_models import MODES, write_modules
from forked_ranks import Ranks
from grids import mostly_slow
from lora_adapters import ALL, make_adapter
from tiny_models import CONFIGS, LATENT, LLAMA

from penstock.engine.config import CacheConfig, ConfigError, EngineConfig, LoraConfig, SchedulerConfig, SpeculativeConfig
from penstock.engine.core.memory import measure_memory
from penstock.engine.core.plan import SlotLoad
from penstock.engine.host_memory import return_free_memory
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.config import DecoderConfig, parse_decoder_config
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.engine.parallel.sizes import DIVIDED, check_sizes
from penstock.engine.quant.scheme import QuantizationName
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.sampling import SamplingParams

VOCAB = 257
ALL_LOGPROBS = SamplingParams(max_tokens=100, temperature=0.0, logprobs=VOCAB, prompt_logprobs=3)
SEEDED = SamplingParams(max_tokens=100, temperature=0.9, top_p=0.95, seed=3, logprobs=VOCAB)
QUICK = {"llama", "qwen3-windows", "gemma3", "deepseek-v3", "qwen3-moe"}
WORLDS = {
    "llama": (2, 4),
    "llama-7to1-llama3-tied": (7,),
    "llama-mha-linear-bias": (2,),
    "qwen3-windows": (2,),
    "qwen3": (4,),
    "qwen2-yarn": (2,),
    "mistral-7to1-window": (7,),
    "gemma2": (2,),
    "gemma3": (2,),
    "phi3-longrope": (2,),
    "olmo2": (2,),
    "olmo3": (2,),
    "exaone4": (2,),
    "gemma1": (2,),
    "ministral": (4,),
    "smollm3": (2,),
    "seed-oss": (2,),
    "ernie4_5": (2,),
    "granite": (2,),
    "glm": (2,),
    "glm4": (2,),
    "cohere": (2,),
    "cohere2": (2,),
    "starcoder2": (2,),
    "mixtral": (2,),
    "qwen2-moe": (2,),
    "qwen3-moe": (2,),
    "glm4-moe": (2,),
    "gpt-oss": (2,),
    "deepseek-v2": (2,),
    "deepseek-v3": (3,),
}
NUM_BLOCKS = 320


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def rank_runner(
    path: Path,
    group: Group | None,
    dtype: str = "float32",
    quantization: QuantizationName | None = None,
    kv_dtype: str = "auto",
    **fields: Any,
) -> ModelRunner:
    """A loaded runner with its cache, as one rank of a group."""
    config = EngineConfig(
        model=read_model_config(
            path, served_names=(), dtype=dtype, kv_dtype=kv_dtype, max_model_len=320, quantization=quantization
        ),
        cache=CacheConfig(block_size=16),
        scheduler=fields.pop("scheduler", SchedulerConfig(max_num_seqs=16)),
        **fields,
    )
    runner = ModelRunner(config, group)
    runner.load()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """`on_ranks(world, function)`: what `function(group)` gives on every rank; with a world of 1, `function(None)`'s."""

    def run(world: int, function: Callable[[Group | None], Any]) -> list[Any]:
        if world == 1:
            return Ranks(1, lambda _: function(None)).results()
        memory = SharedMemory.create(world, 1 << 14)
        meeting = f"file://{tmp_path}/meeting"
        try:
            return Ranks(world, lambda rank: function(Group(rank, world, memory, meeting, 60.0))).successes()
        finally:
            memory.close()

    return run


class Told:
    """What one rank reports of a conversation; travels to the test."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scores: list[np.ndarray] = []
        """Of every sampled token, all tokens' log probabilities."""

    def add(self, result: Any, index: int) -> None:
        if result.counts[index]:
            at = result.logprobs.plan_rows.tolist().index(index)
            self.tokens.append(int(result.token_ids[index, 0]))
            self.scores.append(result.logprobs.top_logprobs[at][np.argsort(result.logprobs.top_ids[at])])

    def same_bits(self, other: "Told") -> bool:
        return self.tokens == other.tokens and all(map(np.array_equal, self.scores, other.scores))


def alone(play: Any, tokens: list[int], sampling: SamplingParams, chunk: int, outputs: int = 6, slot: int = -1) -> Told:
    told, sequence = Told(), play.admit(tokens, sampling, lora_slot=slot)
    while len(told.tokens) < outputs:
        told.add(play.step([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))]), 0)
    return told


def in_a_crowd(play: Any, tokens: list[int], sampling: SamplingParams, outputs: int = 6) -> Told:
    """The same among requests that begin and end around it."""
    told = Told()
    others = [play.admit(prompt(50 + number, 5 + 9 * number), sampling) for number in range(4)]
    play.step([(other, len(other.tokens)) for other in others])
    sequence = play.admit(tokens, sampling)
    while len(told.tokens) < outputs:
        work = [(other, 1) for other in others] + [(sequence, min(33, len(sequence.tokens) - sequence.computed))]
        told.add(play.step(work), len(others))
        if len(told.tokens) in (2, 4):
            play.release(others.pop())
    return told


@pytest.mark.req("DX-04", "DX-05", "DX-06", "DX-07")
@pytest.mark.parametrize("name", mostly_slow(WORLDS, QUICK))
def test_ranks_answer_as_one_does_and_with_the_same_bits_in_any_batch(name, checkpoint, driver, on_ranks):
    path, tokens = checkpoint(name), prompt(1, 40)

    def life(group: Group | None) -> tuple[Told, bool, int, int, np.ndarray, int]:
        runner = rank_runner(path, group)
        told = alone(driver(runner), tokens, ALL_LOGPROBS, 33)
        embedding = runner.model.embed_tokens
        assert embedding is not None
        every = torch.arange(config_of(path).vocab_size)
        embedded, held = embedding(every).numpy(), embedding.weight.untyped_storage().nbytes()
        same = told.same_bits(in_a_crowd(driver(runner), tokens, ALL_LOGPROBS))
        play = driver(runner)
        sequence = play.admit(tokens, ALL_LOGPROBS)
        play.step([(sequence, 40)])
        before = calls(group)
        play.step([(sequence, 1)])
        return told, same, calls(group) - before, runner.kv_layout().page_bytes, embedded, held

    [(expected, _, _, whole_page, vectors, table)] = on_ranks(1, life)
    assert not np.allclose(expected.scores[0], expected.scores[1]), "the text makes no difference"
    layers, kv_heads = config_of(path).num_layers, config_of(path).num_kv_heads
    for world in WORLDS[name]:
        found = on_ranks(world, life)
        for told, same, collectives, page, embedded, held in found:
            assert told.tokens == expected.tokens
            np.testing.assert_allclose(np.exp(told.scores), np.exp(expected.scores), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(told.scores, expected.scores, rtol=1e-5, atol=1e-5)
            assert told.same_bits(found[0][0]) and same
            norms = 2 * layers if name.startswith("olmo") else 0  # it normalises all heads together
            assert collectives == 2 * layers + 2 + norms, "one more for the embedding, and one for the logits"
            assert embedded.tobytes() == vectors.tobytes()
            assert held == (-(-len(vectors) // world) + 2) * table // len(vectors), "a rank holds its part of the rows"
            # A latent is what all heads share: every rank has all of it.
            assert page == (whole_page if name in LATENT else whole_page * max(1, kv_heads // world) // kv_heads)


def test_every_architecture_that_is_divided_is_shown_here():
    elsewhere = {name for name in DIVIDED if name.endswith("ForConditionalGeneration")}  # their tests are with those of images
    same = {"KimiK2ForCausalLM"}  # DeepSeek V3 by another name
    assert {f"{CONFIGS[name][0]}ForCausalLM" for name in WORLDS} == DIVIDED - elsewhere - same


def test_others_are_refused_by_name(checkpoint):
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size 2: NewForCausalLM is not divided among ranks so far \(divided: C"
    ):
        check_sizes("NewForCausalLM", config_of(checkpoint("llama")), 2)


@pytest.mark.parametrize("mode", ["last", "mean"])
def test_embeddings_of_ranks_are_those_of_one(checkpoint, driver, on_ranks, tmp_path, mode):
    path = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    write_modules(path, MODES[mode], 64)

    def life(group: Group | None) -> np.ndarray:
        play, tokens = driver(rank_runner(path, group)), prompt(1, 40)
        sequence = play.admit(tokens, SamplingParams(max_tokens=1))
        play.step([(sequence, 30)])
        return play.step([(sequence, 10)]).pooled.vectors

    [expected] = on_ranks(1, life)
    assert np.abs(expected).max() > 0.1
    for world in (2, 4):
        for found in on_ranks(world, life):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def calls(group: Group | None) -> int:
    """Collectives that the rank has begun, as the memory that it shares says."""
    return 0 if group is None else group.memory.progress()[group.rank].calls


def config_of(path: Path) -> DecoderConfig:
    return parse_decoder_config(read_object(path / "config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [ALL_LOGPROBS, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("world", "dtype"), [(2, "bfloat16"), (4, "bfloat16"), (2, "float16")])
def test_half_precision_keeps_its_bits_in_any_batch_and_chunk(world, dtype, sampling, checkpoint, driver, on_ranks):
    """float16 runs on torch's reference: nothing is taped, and ranks load the compiled sums apart."""

    def life(group: Group | None) -> list[Told]:
        runner = rank_runner(checkpoint("llama"), group, dtype)
        tokens = prompt(1, 40)
        runs = [alone(driver(runner), tokens, sampling, chunk) for chunk in (40, 7)]
        return [*runs, in_a_crowd(driver(runner), tokens, sampling)]

    found = on_ranks(world, life)
    for of_rank in found:
        assert all(told.same_bits(found[0][0]) for told in of_rank)


def test_adapters_are_divided_with_the_layers(checkpoint, driver, on_ranks, tmp_path):
    path = checkpoint("llama")
    transformers = pytest.importorskip("transformers")
    adapter = make_adapter(tmp_path / "adapter", transformers.AutoModelForCausalLM.from_pretrained(path), modules=ALL)

    def life(group: Group | None) -> tuple[Told, Told, bytes]:
        runner = rank_runner(path, group, lora=LoraConfig())
        runner.read_adapter(1, str(adapter), None)
        while not (reads := runner.take_reads()):
            time.sleep(0.01)
        plain = alone(driver(runner), prompt(1, 40), ALL_LOGPROBS, 33)
        play = driver(runner)
        play.lora_loads = [SlotLoad(0, 1)]
        return plain, alone(play, prompt(1, 40), ALL_LOGPROBS, 33, slot=0), reads[1].digest

    [(plain, expected, _)] = on_ranks(1, life)
    assert not np.allclose(plain.scores, expected.scores, atol=0.1), "the adapter changes nothing"
    for world in (2, 4):
        found = on_ranks(world, life)
        for other, told, _ in found:
            np.testing.assert_allclose(told.scores, expected.scores, atol=1e-4)
            np.testing.assert_allclose(other.scores, plain.scores, atol=1e-5)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_are_the_same_on_every_rank_whatever_their_clocks_say(checkpoint, driver, on_ranks, monkeypatch, method):
    """How many drafts pay depends on measured times: ranks go by those of rank 0, where drafts cost nothing."""
    time_decodes = ModelRunner._time_decodes

    def by_own_clock(runner: ModelRunner, rows: int, drafts: int) -> float:
        time_decodes(runner, rows, drafts)
        return runner._comm.agree(0.001 * (1 + 9 * drafts * runner._group.rank))

    monkeypatch.setattr(ModelRunner, "_time_decodes", by_own_clock)
    own = {"model": checkpoint("qwen3")} if method == "draft_model" else {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=3, **own)
    scheduler = SchedulerConfig(max_num_seqs=4, num_speculative_tokens=3, num_lookahead_tokens=3)

    def life(group: Group | None) -> list[Any]:
        runner = rank_runner(checkpoint("llama"), group, scheduler=scheduler, speculative=speculative)
        runner.warm_up()
        play, found = driver(runner), list[Any]()
        sequence = play.admit([5, 6, 7, 8] * 8, SamplingParams(max_tokens=100, temperature=0.0))
        for number in range(12):
            if group is not None and group.rank == number % group.world:
                time.sleep(0.01)
            result = play.step([(sequence, len(sequence.tokens) - sequence.computed)])
            found.append((result.token_ids.tolist(), None if result.drafts is None else result.drafts.tolist()))
        return found

    found = on_ranks(2, life)
    assert found[0] == found[1]
    assert any(drafts is not None for _, drafts in found[0]), "no drafts were made"


def test_a_rank_holds_its_share_of_the_weights_and_of_the_cache(checkpoint, tmp_path, on_ranks):
    """Measured by the system, not declared."""
    raw = read_object(checkpoint("llama") / "config.json")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **shape, **heads}))

    def life(group: Group | None) -> tuple[int, int]:
        model = read_model_config(tmp_path, served_names=(), dtype="float32", max_model_len=320, load_format="dummy")
        runner = ModelRunner(EngineConfig(model=model, cache=CacheConfig(), scheduler=SchedulerConfig(max_num_seqs=4)), group)
        return_free_memory()  # else what the forking process has freed is used again, and counts as nothing
        before = measure_memory().own
        runner.load()
        gc.collect()
        return_free_memory()
        loaded = measure_memory().own
        runner.initialize_kv_cache(1000)
        for cache in runner.kv_caches:
            cache.fill_(1)  # it takes memory when it is first written
        return loaded - before, measure_memory().own - loaded

    [(whole, cache)] = on_ranks(1, life)
    embedding = 4 * 4096 * 512
    assert whole > 70e6 and cache > 60e6
    for weights, kv in on_ranks(2, life):
        assert abs(weights - (embedding + (whole - embedding) / 2)) < 0.1 * whole
        assert abs(kv - cache / 2) < 0.05 * cache


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("qwen3-moe", {"moe_intermediate_size": 41}, "moe_intermediate_size 41 cannot .*; possible sizes: 1$"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 57}, "the intermediate size of the shared expert, 57 cannot"),
        ("qwen3-moe", {"intermediate_size": 113}, "intermediate_size 113 cannot be divided"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(name, change, problem, checkpoint):
    raw = read_object(checkpoint(name) / "config.json") | change
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size 2: {problem}"):
        check_sizes(f"{CONFIGS[name][0]}ForCausalLM", parse_decoder_config(raw), 2)


@pytest.mark.parametrize(
    ("name", "keepers"),
    [("llama", [0, 1]), ("llama", [0, 0, 2, 2]), ("deepseek-v2", [0, 0])],
    ids=["heads of their own", "a head for two", "a latent"],
)
def test_the_first_of_the_ranks_that_have_the_same_pages_keeps_them(name, keepers, checkpoint):
    model = read_model_config(checkpoint(name), served_names=(), dtype="float32", max_model_len=320)
    config = EngineConfig(model=model, cache=CacheConfig(block_size=16), scheduler=SchedulerConfig())
    memory = SharedMemory.create(len(keepers))
    groups = [Group(rank, len(keepers), memory, "", 60.0) for rank in range(len(keepers))]
    assert [ModelRunner(config, group).page_keeper() for group in groups] == keepers
    memory.close()


def test_the_size_of_an_mlp_that_no_layer_has_is_not_looked_at(checkpoint):
    raw = read_object(checkpoint("qwen3-moe") / "config.json") | {"intermediate_size": 113, "decoder_sparse_step": 1}
    check_sizes("Qwen3MoeForCausalLM", parse_decoder_config(raw), 2)


def wide_model(name: str, folder: Path) -> None:
    """Writes random weights. Of the inputs that two ranks divide, each has whole groups."""
    transformers = pytest.importorskip("transformers")
    family, own = CONFIGS[name]
    sizes = LLAMA | own | {"intermediate_size": 256, "head_dim": 64, "max_position_embeddings": 320}
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**sizes, eos_token_id=None, bos_token_id=None)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("scheme", ["int8_per_channel_weight_only", "int4_per_group_32", "fp8_per_block"])
def test_quantized_weights_are_divided_too(scheme, name, driver, on_ranks, tmp_path):
    wide_model(name, tmp_path)
    tokens = prompt(1, 40)

    def life(group: Group | None) -> tuple[Told, bool]:
        runner = rank_runner(tmp_path, group, quantization=scheme)
        told = alone(driver(runner), tokens, ALL_LOGPROBS, 33)
        return told, told.same_bits(in_a_crowd(driver(runner), tokens, ALL_LOGPROBS))

    [(expected, _)] = on_ranks(1, life)
    for told, same in (found := on_ranks(2, life)):
        assert told.tokens == expected.tokens and told.same_bits(found[0][0]) and same
        np.testing.assert_allclose(told.scores, expected.scores, atol=1e-4)
    [(plain, _)] = on_ranks(1, lambda group: (alone(driver(rank_runner(tmp_path, group)), tokens, ALL_LOGPROBS, 33), True))
    assert not np.allclose(plain.scores, expected.scores, atol=1e-3), "nothing was quantized"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel"])
def test_ranks_round_their_own_parts_of_a_tokens_inputs(scheme, name, driver, on_ranks, tmp_path):
    """They agree to the bit. One process rounds whole tokens: it is near, and nearer than a model whose weights are whole."""
    wide_model(name, tmp_path)
    tokens = prompt(1, 40)

    def life(group: Group | None, scheme: QuantizationName | None = scheme) -> tuple[Told, bool]:
        runner = rank_runner(tmp_path, group, quantization=scheme)
        told = alone(driver(runner), tokens, ALL_LOGPROBS, 33)
        return told, told.same_bits(in_a_crowd(driver(runner), tokens, ALL_LOGPROBS))

    def distance(other: Told) -> float:
        return float(np.abs(other.scores[0] - expected.scores[0]).mean())

    [(expected, _)] = on_ranks(1, life)
    [(plain, _)] = on_ranks(1, lambda group: life(group, None))
    for told, same in (found := on_ranks(2, life)):
        assert told.same_bits(found[0][0]) and same
        assert 0 < distance(told) < 0.7 * distance(plain)
