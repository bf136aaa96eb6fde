"""What requests ask for beside a token, through a whole engine on a device: the CPU's tokens and logprobs, overlapped or not, in
graphs or without."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from test_core_with_runner import SCHEDULER, requests
from test_device_runner import Engine

from penstock.engine.config import GraphConfig
from penstock.engine.messages import AddRequest, FinishReason

pytestmark = pytest.mark.slow

GRAPHS = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1, 2, 4, 8, 16, 48))
Found = tuple[float, int, list[int], list[float]]
"""Of one token: its logprob, its rank, the likeliest ids and theirs."""


def rows(columns: Any, sampled: bytes) -> Iterator[Found]:
    values, ranks = np.frombuffer(sampled, np.float32).tolist(), np.frombuffer(columns.ranks, np.int32).tolist()
    top = np.frombuffer(columns.top_ids, np.int32).reshape(len(values), columns.width)
    top_logprobs = np.frombuffer(columns.top_logprobs, np.float32).reshape(top.shape)
    for value, rank, ids, logprobs in zip(values, ranks, top, top_logprobs, strict=True):
        asked = int((ids >= 0).sum())
        yield value, rank, ids[:asked].tolist(), logprobs[:asked].tolist()


def logprobs(engine: Engine) -> dict[int, list[Found]]:
    """By request, in the order of its tokens."""
    found: dict[int, list[Found]] = {}
    for frame in engine.frames:
        if frame.logprobs is not None:
            indexes = np.frombuffer(frame.indexes, np.int64)[np.frombuffer(frame.logprobs.positions, np.int32)]
            for index, row in zip(indexes.tolist(), rows(frame.logprobs, frame.logprobs.sampled), strict=True):
                found.setdefault(index, []).append(row)
    return found


def prompt_logprobs(engine: Engine) -> dict[tuple[int, int, int], Found]:
    """By request, position and token."""
    found = {}
    for frame in engine.frames:
        if (columns := frame.prompt_logprobs) is not None:
            places = (np.frombuffer(columns.indexes, np.int64), np.frombuffer(columns.positions, np.int32))
            keys = zip(*(place.tolist() for place in places), np.frombuffer(columns.token_ids, np.int32).tolist(), strict=True)
            found |= dict(zip(keys, rows(columns, columns.logprobs), strict=True))
    return found


def check_alike(found: list[Found], expected: list[Found]) -> None:
    assert len(found) == len(expected)
    for (value, rank, ids, values), (due, due_rank, due_ids, dues) in zip(found, expected, strict=True):
        assert (rank, ids) == (due_rank, due_ids)
        np.testing.assert_allclose([value, *values], [due, *dues], atol=1e-4)


def replaced(batch: list[AddRequest], **fields: Any) -> list[AddRequest]:
    """With other sampling; a value may be a function of the request's index."""

    def one(request: AddRequest) -> AddRequest:
        values = {name: value(request.index) if callable(value) else value for name, value in fields.items()}
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **values))

    return [one(request) for request in batch]


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama")


@pytest.mark.req("SMP-15", "SMP-16", "SMP-17", "SMP-18", "SMP-19", "SMP-20", "AS-17", "CG-29")
@pytest.mark.parametrize(("depth", "num_blocks", "graphs"), [(1, 100, None), (2, 22, None), (2, 100, GRAPHS)])
def test_changed_logits_have_the_tokens_in_flight(path, build_runner, build_device_runner, depth, num_blocks, graphs):
    """Penalties and bad words look at tokens that the host does not know yet."""
    batch = requests(adjusted=True)
    expected = Engine(build_runner(path, scheduler=SCHEDULER, form="reference"), 1, 100).run(batch)
    found = Engine(build_device_runner(path, scheduler=SCHEDULER, depth=depth, graphs=graphs), depth, num_blocks)
    before = found.runner.runtime.synchronizations
    assert found.run(batch) == expected
    assert (found.core.stats().preemptions > 0) == (num_blocks == 22)
    assert found.runner.runtime.synchronizations == before


@pytest.mark.req("LP-01", "AS-17")
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_are_those_of_a_cpu(path, build_runner, build_device_runner, mode):
    """Of some requests, several numbers of them in one step; of greedy, filtered and changed choices."""
    asked = replaced(
        requests(adjusted=False), logprobs=lambda index: [None, 0, 1, 5][index % 4], top_k=lambda index: index % 3 * 9
    )
    asked += [
        msgspec.structs.replace(request, index=request.index + 10, request_id=f"s{request.index}")
        for request in replaced(requests(adjusted=True)[:6], logprobs=3)
    ]
    cpu = build_runner(path, scheduler=SCHEDULER, form="reference")
    cpu.config = msgspec.structs.replace(cpu.config, logprobs_mode=mode)
    expected = Engine(cpu, 1, 200)
    expected.run(asked)
    graphs = GRAPHS if mode == "raw_logprobs" else None
    found = Engine(build_device_runner(path, scheduler=SCHEDULER, logprobs_mode=mode, graphs=graphs), 2, 200)
    assert found.run(asked) == expected.tokens
    due, got = logprobs(expected), logprobs(found)
    assert due.keys() == got.keys() and len(due) > 10
    for index, rows_of in due.items():
        check_alike(got[index], rows_of)


@pytest.mark.req("LP-01", "MR-09")
@pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["eager", "graphs"])
def test_prompt_logprobs_are_those_of_a_cpu(path, build_runner, build_device_runner, graphs):
    """In chunks, beside requests that do not ask, through preemptions."""
    asked = replaced(requests(adjusted=False), prompt_logprobs=lambda index: [2, None, 0][index % 3])
    expected = Engine(build_runner(path, scheduler=SCHEDULER, form="reference"), 1, 100)
    expected.run(asked)
    found = Engine(build_device_runner(path, scheduler=SCHEDULER, graphs=graphs), 2, 22)
    assert found.run(asked) == expected.tokens and found.core.stats().preemptions > 0
    due, got = prompt_logprobs(expected), prompt_logprobs(found)
    assert due.keys() == got.keys() and len(due) > 200
    check_alike([got[key] for key in due], list(due.values()))


def test_what_no_token_is_left_for_is_that_requests_error(path, build_device_runner):
    runner = build_device_runner(path, scheduler=SCHEDULER)
    stuck = replaced(requests(adjusted=False)[:3], allowed_token_ids=lambda i: (5,) if i == 1 else (), bad_words=((5,),))
    found = Engine(runner, 2, 100)
    found.run(stuck)
    assert "no token is left to sample" in (found.finished[1].error or "") and found.finished[1].reason is FinishReason.ERROR
    assert found.finished[0].reason is found.finished[2].reason is FinishReason.LENGTH
