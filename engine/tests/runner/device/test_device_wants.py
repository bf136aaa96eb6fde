"""Engines on a device whose requests want more than tokens, against engines on a CPU: changed logits, logprobs, scores."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from recording_graphs import RecordingGraphs
from test_core_with_runner import SCHEDULER, requests
from test_device_runner import VOCAB, Engine

from penstock.engine.config import ConfigError, GraphConfig
from penstock.engine.messages import AddRequest, FinishReason
from penstock.engine.sampling import SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama")


@pytest.fixture(scope="module")
def cpu(path, build_runner):
    return build_runner(path, scheduler=SCHEDULER, form="reference")


def listen(engine: Engine, batch: list[AddRequest]) -> tuple[dict[int, list[int]], dict[tuple[int, int], Any], dict[int, Any]]:
    """Tokens by request; (request, position of the output) → its logprob and alternatives; request → its prompt's scores."""
    sampled: dict[tuple[int, int], Any] = {}
    prompts: dict[int, dict[int, tuple[float, int]]] = {}
    places: Counter[int] = Counter()
    original = engine.core.step

    def step():
        frame = original()
        if frame is None:
            return frame
        if (found := frame.logprobs) is not None:
            offsets = np.frombuffer(frame.offsets, np.int32)
            positions = np.frombuffer(found.positions, np.int32)
            owners = np.frombuffer(frame.indexes, np.int64)[np.searchsorted(offsets, positions, side="right") - 1]
            values, ranks = np.frombuffer(found.sampled, np.float32), np.frombuffer(found.ranks, np.int32)
            top = np.frombuffer(found.top_ids, np.int32).reshape(len(owners), -1)
            for at, index in enumerate(owners.tolist()):
                alternatives = [token for token in top[at].tolist() if token >= 0]
                sampled[index, places[index]] = (float(values[at]), int(ranks[at]), alternatives)
                places[index] += 1
        if (found := frame.prompt_logprobs) is not None:
            columns = np.frombuffer(found.indexes, np.int64), np.frombuffer(found.positions, np.int32)
            values, ranks = np.frombuffer(found.logprobs, np.float32), np.frombuffer(found.ranks, np.int32)
            for index, position, value, rank in zip(*columns, values.tolist(), ranks.tolist(), strict=True):
                prompts.setdefault(int(index), {})[int(position)] = (value, rank)
        return frame

    engine.core.step = step
    return engine.run(batch), sampled, prompts


def wanting(adjusted: bool) -> list[AddRequest]:
    """Of `requests`, some with logprobs, some with scored prompts."""
    found = []
    for request in requests(adjusted):
        fields = {"logprobs": request.index} if request.index % 2 else {}
        fields |= {"prompt_logprobs": request.index % 4} if request.index % 3 == 0 else {}
        found.append(msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **fields)))
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "adjusted"])
def batch(request):
    return wanting(request.param)


@pytest.fixture(scope="module")
def expected(cpu, batch):
    return listen(Engine(cpu, 1, 100), batch)


@pytest.mark.req("SMP-17", "LP-01", "LP-04", "AS-04")
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 100), (2, 22)])
def test_a_device_gives_what_a_cpu_gives(path, build_device_runner, batch, expected, graphs, depth, num_blocks):
    more: dict[str, Any] = {}
    if graphs:
        more = {"recording": RecordingGraphs(), "graphs": GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1, 2, 4, 8, 48))}
    runner = build_device_runner(path, scheduler=SCHEDULER, depth=depth, **more)
    engine = Engine(runner, depth, num_blocks)
    while graphs and runner.graphs.capture_next():
        pass
    tokens, sampled, prompts = listen(engine, batch)
    assert tokens == expected[0]
    assert {key: found[1:] for key, found in sampled.items()} == {key: found[1:] for key, found in expected[1].items()}
    for key, found in sampled.items():
        assert found[0] == pytest.approx(expected[1][key][0], abs=2e-4)
    assert {index: len(found) for index, found in prompts.items()} == {index: len(found) for index, found in expected[2].items()}
    for index, found in prompts.items():
        for position, (value, rank) in found.items():
            assert value == pytest.approx(expected[2][index][position][0], abs=2e-4)
            assert rank == expected[2][index][position][1]


def test_full_graphs_are_for_every_decode_step_that_scores_no_prompt(path, build_device_runner):
    config = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1, 2, 16))
    runner = build_device_runner(path, scheduler=SCHEDULER, recording=RecordingGraphs(), graphs=config)
    engine = Engine(runner, 2, 100)
    while runner.graphs.capture_next():
        pass
    for index, fields in enumerate([{"prompt_logprobs": 1}, {"logprobs": 2}, {"presence_penalty": 1.0}]):
        sampling = SamplingParams(max_tokens=9, temperature=0.0, **fields)
        engine.run([AddRequest(index, f"r{index}", list(range(16)), sampling, 0.0)])
    steps = {found.mode: found.steps for found in engine.core.stats().step.graphs}
    assert steps == {"FULL": 24, "PIECEWISE": 3}


def test_a_mask_of_everything_is_that_requests_error(path, build_device_runner):
    engine = Engine(build_device_runner(path, scheduler=SCHEDULER), 2, 100)
    prompt = list(range(5, 15))
    masked = SamplingParams(max_tokens=4, allowed_token_ids=(7,), bad_words=((7,),))
    free = SamplingParams(max_tokens=4, temperature=0.0)
    engine.run([AddRequest(0, "r0", prompt, masked, 0.0), AddRequest(1, "r1", prompt, free, 0.0)])
    assert engine.finished[0].reason is FinishReason.ERROR
    assert engine.finished[1].reason is FinishReason.LENGTH
    assert len(engine.tokens[1]) == 4


def with_processors(runner: Any, names: tuple[str, ...]) -> Any:
    """The runner as if it had been started with them."""
    model = msgspec.structs.replace(runner.config.model, logits_processors=names)
    runner.config = msgspec.structs.replace(runner.config, model=model)
    runner._reset()
    return runner


def test_processors_of_ones_own_see_the_tokens_of_two_steps_in_flight(path, build_device_runner, build_runner):
    """Each favours a token once the output has some; the device's host does not know them when it plans."""
    names = ("own_processors:Favour", "own_processors:Sharpen")
    prompt = np.random.default_rng(5).integers(0, VOCAB, 12).tolist()
    asks = [{"favour": [9, 90.0, 3]}, {"sharpen": True}, {}, {"favour": [9, 90.0, 0], "break": "raise"}]
    batch = [
        AddRequest(index, f"r{index}", prompt, SamplingParams(max_tokens=6, temperature=0.7, seed=index, extra_args=extra), 0.0)
        for index, extra in enumerate(asks)
    ]
    here = Engine(with_processors(build_runner(path, scheduler=SCHEDULER, form="reference"), names), 1, 100)
    there = Engine(with_processors(build_device_runner(path, scheduler=SCHEDULER), names), 2, 100)
    assert there.run(batch) == here.run(batch)
    assert there.tokens[0][3:] == [9] * 3
    assert there.finished[3].reason is FinishReason.ERROR


def test_a_processor_that_cannot_be_had_is_an_error_at_start(path, build_device_runner):
    runner = build_device_runner(path, scheduler=SCHEDULER)
    with pytest.raises(ConfigError, match="own_processors:Missing"):
        with_processors(runner, ("own_processors:Missing",))
