"""Experts divided among ranks in processes of their own: the bits of one rank, whoever has tokens and whoever has none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_ranks import Ranks
from test_tensor_parallel import ALL_LOGPROBS, NUM_BLOCKS, Told, alone, in_a_crowd, prompt

from penstock.engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.models.layers.placement import Placement
from penstock.engine.parallel.expert_group import ExpertGroup
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.engine.runner.model_runner import ModelRunner

FAMILIES = ["mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe", "gpt-oss", "deepseek-v2", "deepseek-v3"]
STEPS = 7
"""Of `alone` with 40 tokens in chunks of 33 and six outputs."""


def runner_of(
    path: Path, experts: ExpertGroup | None, group: Group | None = None, dtype: str = "float32", **fields: Any
) -> ModelRunner:
    """A loaded runner with its cache, whose steps are those of all ranks."""
    cores, eplb = (1, None) if experts is None else (experts.cores, experts.eplb)
    parallel = ParallelConfig(expert_parallel=experts is not None, data_parallel_size=cores, eplb=eplb)
    config = EngineConfig(
        model=read_model_config(path, served_names=(), dtype=dtype, max_model_len=320, **fields),  # type: ignore[arg-type]
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=16),
        parallel=parallel,
    )
    runner = ModelRunner(config, group, experts)
    runner.load()
    runner.initialize_kv_cache(NUM_BLOCKS)
    if runner._exchange is not None:
        runner._exchange.open()
    return runner


def on_ranks(world: int, life: Callable[[int, SharedMemory, SharedMemory], Any]) -> list[Any]:
    """What each rank gives, with the memory of the experts' group and another of a tensor-parallel one."""
    memory, other = SharedMemory.create(world, 1 << 14), SharedMemory.create(world, 1 << 14)
    try:
        return Ranks(world, lambda rank: life(rank, memory, other)).successes()
    finally:
        memory.close()
        other.close()


def expert_bytes(runner: ModelRunner) -> int:
    """Of the experts' weights that the rank holds."""
    methods = [method for experts in runner.model.mixtures for method in (*experts._gate_up, *experts._down)]  # type: ignore[attr-defined]
    return sum(method.kernel_weight.nbytes for method in methods)


@pytest.mark.req("DX-12", "DX-13")
@pytest.mark.parametrize("name", FAMILIES)
def test_cores_that_divide_experts_have_the_bits_of_one_rank(name, checkpoint, driver):
    """The second rank first has no tokens and serves, then both have crowds of their own. The numbers of experts divide unevenly
    among three ranks."""
    path, tokens = checkpoint(name), prompt(1, 40)

    def whole(_: int) -> tuple[Told, int]:
        runner = runner_of(path, None)
        return alone(driver(runner), tokens, ALL_LOGPROBS, 33), expert_bytes(runner)

    def life(rank: int, memory: SharedMemory, _: SharedMemory) -> tuple[Told | None, Told, int]:
        runner = runner_of(path, ExpertGroup(rank, 1, memory, 60.0))
        mine = None
        if rank == 0:
            mine = alone(driver(runner), tokens, ALL_LOGPROBS, 33)
        else:
            for _step in range(STEPS):
                runner.serve_others()
        crowd = in_a_crowd(driver(runner), tokens, ALL_LOGPROBS)
        return mine, crowd, expert_bytes(runner)

    [(expected, every_byte)] = Ranks(1, whole).results()
    assert not np.allclose(expected.scores[0], expected.scores[1]), "the text makes no difference"
    found = on_ranks(3, life)
    assert found[0][0] is not None and found[0][0].same_bits(expected)
    assert all(crowd.same_bits(expected) for _, crowd, _ in found)
    shares = [len(Placement.linear(_experts(path), 3).own(rank)) for rank in range(3)]
    assert [size * _experts(path) for _, _, size in found] == [every_byte * share for share in shares]


def _experts(path: Path) -> int:
    from test_tensor_parallel import config_of

    experts = config_of(path).experts
    assert experts is not None
    return experts.count


@pytest.mark.req("DX-13")
@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss", "deepseek-v2"])
def test_tensor_parallel_ranks_divide_experts_too(name, checkpoint, driver, tmp_path):
    """Attention and the shared expert are cut, as without expert parallelism; so the bits are those of two ranks."""
    path, tokens = checkpoint(name), prompt(1, 40)

    def life(rank: int, memory: SharedMemory, layers: SharedMemory) -> tuple[Told, bool, int]:
        group = Group(rank, 2, layers, f"file://{tmp_path}/meeting", 60.0)
        runner = runner_of(path, ExpertGroup(rank, 2, memory, 60.0), group)
        told = alone(driver(runner), tokens, ALL_LOGPROBS, 33)
        return told, told.same_bits(in_a_crowd(driver(runner), tokens, ALL_LOGPROBS)), expert_bytes(runner)

    def whole(_: int) -> tuple[Told, int]:
        runner = runner_of(path, None)
        return alone(driver(runner), tokens, ALL_LOGPROBS, 33), expert_bytes(runner)

    [(expected, every_byte)] = Ranks(1, whole).results()
    for told, same, size in (found := on_ranks(2, life)):
        assert told.tokens == expected.tokens and same and told.same_bits(found[0][0])
        np.testing.assert_allclose(told.scores, expected.scores, rtol=1e-5, atol=1e-5)
        assert size * 2 == every_byte


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", None), ("float16", None), ("bfloat16", "int8_per_channel_weight_only")]
)
def test_other_dtypes_have_the_bits_of_one_rank_too(dtype, quantization, checkpoint, driver):
    """float16 runs on torch's reference, each expert by itself; few bits on a fused kernel of their own."""
    path, tokens = checkpoint("qwen3-moe"), prompt(1, 40)

    def whole(_: int) -> Told:
        return alone(driver(runner_of(path, None, dtype=dtype, quantization=quantization)), tokens, ALL_LOGPROBS, 33)

    def life(rank: int, memory: SharedMemory, _: SharedMemory) -> Told:
        runner = runner_of(path, ExpertGroup(rank, 1, memory, 60.0), dtype=dtype, quantization=quantization)
        return in_a_crowd(driver(runner), tokens, ALL_LOGPROBS)

    [expected] = Ranks(1, whole).results()
    assert all(told.same_bits(expected) for told in on_ranks(2, life))
