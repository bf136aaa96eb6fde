"""Busy experts get copies on other ranks while requests run: the bits of one rank before, meanwhile and afterwards."""

from typing import NamedTuple

import pytest
import torch
from forked_ranks import Ranks
from test_expert_parallel import on_ranks, runner_of
from test_tensor_parallel import ALL_LOGPROBS, Told, alone, prompt

from penstock.engine.config import EplbConfig
from penstock.engine.parallel.expert_group import ExpertGroup
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.stats import ExpertStats

OUTPUTS = 24


class Life(NamedTuple):
    """What a rank has to tell."""

    streams: list[Told]
    """Before and while experts move; afterwards; and with weights that were read again."""
    contents: list[dict[tuple[int, int], set[bytes]]]
    """By layer and expert, what its slots on the rank hold: at first, afterwards, and after the weights were read again."""
    stats: ExpertStats | None


def contents(runner: ModelRunner) -> dict[tuple[int, int], set[bytes]]:
    found: dict[tuple[int, int], set[bytes]] = {}
    for number, layer in enumerate(runner.model.mixtures):  # type: ignore[attr-defined]
        for slot, expert in enumerate(layer._slots):
            held = [tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in layer.held(slot)]
            found.setdefault((number, expert), set()).add(b"".join(held))
    return found


@pytest.mark.slow
@pytest.mark.req("DX-14", "DX-20", "DX-21")
@pytest.mark.parametrize(
    ("name", "redundant", "cut", "dtype", "quantization"),
    [
        ("gpt-oss", 2, False, "float32", None),
        ("deepseek-v2", 0, True, "float16", None),
        ("qwen3-moe", 1, False, "bfloat16", "int8_per_group_32"),
    ],
)
def test_streams_keep_their_bits_while_experts_move(name, redundant, cut, dtype, quantization, checkpoint, driver, tmp_path):
    """Two cores of a rank each, or one core of two ranks (`cut`). Every slot that an expert has moved to holds what the
    checkpoint has of it, in the form in which kernels read it. With float16 each expert runs by itself."""
    path, tokens = checkpoint(name), prompt(1, 40)
    eplb = EplbConfig(window_size=8, step_interval=12, num_redundant_experts=redundant)

    def stream(runner: ModelRunner) -> Told:
        return alone(driver(runner), tokens, ALL_LOGPROBS, 33, OUTPUTS)

    def whole(_: int) -> Life:
        runner = runner_of(path, None, dtype=dtype, quantization=quantization)
        return Life([stream(runner)], [contents(runner)], None)

    def life(rank: int, memory: SharedMemory, other: SharedMemory) -> Life:
        group = Group(rank, 2, layers, f"file://{tmp_path}/meeting", 60.0) if cut else None
        experts = ExpertGroup(rank, 2 if cut else 1, memory, 60.0, None, other, eplb)
        runner = runner_of(path, experts, group, dtype=dtype, quantization=quantization)
        held, streams = [contents(runner)], [stream(runner)]
        play = driver(runner, poison=False)
        sequence = play.admit(tokens, ALL_LOGPROBS)
        play.step([(sequence, len(tokens))])
        while (stats := runner.expert_stats()) is not None and not stats.rebalances:
            play.step([(sequence, 1)])
        streams.append(stream(runner))
        held.append(contents(runner))
        served = stats and stats.served
        runner.sleep(2)
        assert (asleep := runner.expert_stats()) is not None and served and min(asleep.served) >= min(served) > 0
        runner.wake_up(["weights", "kv_cache"])
        runner.reload_weights(None)
        held.append(contents(runner))
        streams.append(stream(runner))
        return Life(streams, held, runner.expert_stats())

    [expected] = Ranks(1, whole).results()
    layers = SharedMemory.create(2, 1 << 14)
    try:
        ranks = on_ranks(2, life)
    finally:
        layers.close()
    for rank in ranks:
        first, *others = [ranks[0].streams[0] if cut else expected.streams[0], *rank.streams]
        assert all(other.same_bits(first) for other in others)
        for held in rank.contents:
            assert all(each == expected.contents[0][place] for place, each in held.items())
        assert rank.contents[0].keys() == rank.contents[2].keys()
        assert rank.stats == ranks[0].stats and rank.stats.rebalances and rank.stats.moved_bytes
    assert any(rank.contents[0].keys() != rank.contents[1].keys() for rank in ranks), "nothing has moved"
    for at in range(3):
        assert {place for rank in ranks for place in rank.contents[at]} == expected.contents[0].keys()
