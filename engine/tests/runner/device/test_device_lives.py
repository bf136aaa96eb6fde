"""Random lives of engines on a device: every kind of request, chunks, preemptions, aborts, sleep, new weights and graphs that
come while requests run, all in one engine, against an engine on a CPU that knows nothing of the kind."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from device_runners import MAX_MODEL_LEN, make_device_runner
from recording_graphs import RecordingGraphs
from test_device_runner import VOCAB, Engine

from penstock.engine.commands import ReloadWeights, ResetPrefixCache, Resume, Sleep, WakeUp
from penstock.engine.config import CudagraphMode, GraphConfig, SchedulerConfig
from penstock.engine.core.memory import max_blocks
from penstock.engine.messages import AbortRequests, AddRequest, Control, FinishReason
from penstock.engine.sampling import SamplingParams

pytestmark = pytest.mark.slow

NAMES = ["llama-7to1-llama3-tied", "gemma2", "qwen3-windows", "phi3-longrope"]
MODES: list[CudagraphMode] = ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]
COMMANDS: list[tuple[Any, ...]] = [
    (ResetPrefixCache(True),),
    (ReloadWeights(),),
    (Sleep(1, "keep"), WakeUp(), Resume()),
    (Sleep(1, "keep"), WakeUp(("kv_cache",)), WakeUp(("weights",)), Resume()),
    (Sleep(2, "keep"), WakeUp(), ReloadWeights(), Resume()),
]
LONGEST = 500


def sampling(draw: random.Random, most: int) -> SamplingParams:
    """Of any kind that has no logprobs, whose last bits differ."""
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, most), "seed": draw.randrange(1 << 31)}
    fields["temperature"] = draw.choice([0.0, 0.0, 0.7, 1.5])
    if draw.random() < 0.4:
        fields |= {"top_k": draw.choice([1, 5, VOCAB + 5]), "top_p": draw.choice([0.05, 0.9]), "min_p": draw.choice([0.0, 0.1])}
    if draw.random() < 0.3:
        fields |= {"repetition_penalty": draw.choice([0.8, 1.3]), "frequency_penalty": 0.5, "presence_penalty": -0.3}
    if draw.random() < 0.2:
        fields |= {"stop_token_ids": tuple(draw.sample(range(VOCAB), 30)), "min_tokens": draw.randint(0, fields["max_tokens"])}
    if draw.random() < 0.2:
        fields |= {"logit_bias": ((draw.randrange(VOCAB), 5.0),), "bad_words": ((draw.randrange(VOCAB),) * 2,)}
    if draw.random() < 0.2:
        fields |= {"allowed_token_ids": tuple(draw.sample(range(VOCAB), 9))}
    return SamplingParams(**fields)


def requests(draw: random.Random, longest: int) -> Iterator[AddRequest]:
    """Some with a common prefix, some as long as the context."""
    common = [draw.randrange(VOCAB) for _ in range(longest // 3)]
    for index in range(9):
        tail = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 3, 20, 60, longest]))]
        prompt = (common[: draw.choice([0, 0, len(common)])] + tail)[: longest - 1]
        yield AddRequest(index, f"r{index}", prompt, sampling(draw, min(25, longest - len(prompt))), float(index))


def live(engine: Engine, batch: list[AddRequest], draw: random.Random) -> set[int]:
    """Runs them, coming and going, among commands and captures; returns those that were aborted."""
    arrivals = sorted((draw.randint(0, 20), request.index) for request in batch)
    aborts = {draw.randint(1, 25): index for index in draw.sample(range(len(batch)), 1)}
    commands = {draw.randint(1, 30): draw.choice(COMMANDS) for _ in range(2)}
    replies, calls = [], 0
    for step in range(LONGEST):
        while arrivals and arrivals[0][0] <= step:
            engine.core.handle(batch[arrivals.pop(0)[1]])
        if step in aborts:
            engine.core.handle(AbortRequests([aborts[step]]))
        for command in commands.get(step, ()):
            calls += 1
            engine.core.handle(Control(calls, command))
            while len(replies) < calls:
                engine.step()
                replies += engine.core.take_replies()
        engine.step()
        if engine.core.may_capture or not engine.core._submitted:
            engine.core.capture_graph()
        if not arrivals and not engine.core.has_work:
            break
    assert [reply.error for reply in replies if reply.error and "unpaused" not in reply.error] == []
    return set(aborts.values())


@pytest.mark.req("AS-17", "CHK-05")
@pytest.mark.parametrize("seed", [0, 3, 5, 6])  # each model and each mode once
def test_everything_at_once_gives_what_a_cpu_gives(checkpoint, build_runner, seed):
    draw = random.Random(seed)
    name, mode, depth = NAMES[seed % 4], MODES[seed // 2 % 4], draw.choice([1, 2, 2, 3])
    longest = draw.choice([64, 150, MAX_MODEL_LEN])
    tokens = draw.choice([16, 33, 200])
    scheduler = SchedulerConfig(max_num_seqs=draw.choice([2, 5, 6]), max_num_batched_tokens=tokens, watermark=0.0)
    batch = list(requests(draw, longest))
    expected = Engine(build_runner(checkpoint(name), scheduler=scheduler, form="reference", max_model_len=longest), 1, 300)
    expected.run(batch)
    sizes = tuple(sorted({min(size, max(tokens, scheduler.max_num_seqs)) for size in draw.sample([1, 2, 3, 5, 16, 48], 3)}))
    runner = make_device_runner(
        checkpoint(name),
        scheduler=scheduler,
        depth=depth,
        max_model_len=longest,
        recording=RecordingGraphs(),
        graphs=GraphConfig(mode=mode, capture_sizes=sizes if mode != "NONE" else ()),
    )
    runner.profile_memory()
    blocks = max_blocks(runner.kv_layout().groups, longest, runner.config.max_in_flight) + draw.choice([1, 5, 40])
    runner.initialize_kv_cache(blocks)
    found = Engine(runner, depth, blocks)
    aborted = live(found, batch, draw)
    for request in batch:
        index = request.index
        here, there = ((engine.tokens.get(index, []), engine.finished[index]) for engine in (found, expected))
        if here[1].reason is FinishReason.ABORT:
            assert index in aborted and here[0] == there[0][: len(here[0])]
        else:
            assert (here[0], here[1].reason, here[1].error) == (there[0], there[1].reason, there[1].error)
    assert found.core.scheduler.kv.pool.num_used == 0
    assert runner.graphs.report().failed == 0
