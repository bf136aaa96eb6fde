"""The real scheduler, cache and runner together: requests get the same tokens alone and in a crowd that is chunked, cached,
preempted and planned ahead."""

from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine.config import SchedulerConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import executor_of
from penstock.engine.messages import AddRequest, FinishReason, PromptLogprobs
from penstock.engine.sampling import SamplingParams

VOCAB, OUTPUTS = 257, 24
SCHEDULER = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, watermark=0.0)


def adjustments(index: int) -> dict[str, Any]:
    """Each kind on some, several on most. No output ends early: stop tokens stay masked to the last."""
    fields: dict[str, Any] = {}
    if index % 2:
        fields |= {"frequency_penalty": 0.4 * index, "presence_penalty": -0.3}
    if index % 3:
        fields |= {"repetition_penalty": 1.0 + index / 10}
    if index % 4:
        fields |= {"min_tokens": OUTPUTS, "stop_token_ids": tuple(range(index, VOCAB, 9))}
    if index % 5:
        fields |= {"bad_words": tuple((token, other) for token in range(index, VOCAB, 17) for other in range(5, 100, 2))}
    if index > 5:
        fields |= {"logit_bias": ((index, 3.0), (index + 1, 2.0)), "allowed_token_ids": tuple(range(index, VOCAB, 3))}
    return fields


def requests(adjusted: bool) -> list[AddRequest]:
    """Ten, some with a common prefix; greedy and random in turn, or greedy with adjusted logits."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB, 64).tolist()
    found = []
    for index in range(10):
        tail = rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist()
        if adjusted:
            sampling = SamplingParams(max_tokens=OUTPUTS, temperature=0.0, **adjustments(index))
        else:
            sampling = SamplingParams(max_tokens=OUTPUTS, temperature=0.9 * (index % 2), top_p=0.9, seed=index)
        found.append(AddRequest(index, f"r{index}", common * (index % 3 > 0) + tail, sampling, float(index)))
    return found


class Engine:
    """A core on a runner of its own, with room for about two of the requests where blocks are few."""

    def __init__(self, runner, depth: int, num_blocks: int) -> None:
        runner.warm_up()
        self.runner, self.depth, self.compared = runner, depth, 0
        self.executor = executor_of(msgspec.structs.replace(runner.config, depth=depth), runner)
        self.scores: dict[int, dict[int, float]] = {}
        """By request and position; a score that changes when it comes again is an error."""
        self.logprobs: dict[int, list[float]] = {}
        """By request: of each of its tokens, where it asks."""
        config, groups = msgspec.structs.replace(runner.config, depth=depth), runner.kv_layout().groups
        self.core = EngineCore(config, self.executor, num_blocks, epoch=1, groups=groups)

    def run(self, batch: list[AddRequest]) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {request.index: [] for request in batch}
        for request in batch:
            self.core.handle(request)
        while self.core.has_work or self.core.is_reading:
            frame = self.core.step()
            if self.depth == 1:
                self._check_mirror()
            if frame is None:
                continue
            self._take(frame.prompt_logprobs)
            offsets, ids = np.frombuffer(frame.offsets, np.int32), np.frombuffer(frame.token_ids, np.int32)
            indexes = np.frombuffer(frame.indexes, np.int64)
            if frame.logprobs is not None:
                owners = np.repeat(indexes, np.diff(offsets))[np.frombuffer(frame.logprobs.positions, np.int32)]
                for index, logprob in zip(
                    owners.tolist(), np.frombuffer(frame.logprobs.sampled, np.float32).tolist(), strict=True
                ):
                    self.logprobs.setdefault(index, []).append(logprob)
            for i, index in enumerate(indexes.tolist()):
                tokens[index] += ids[offsets[i] : offsets[i + 1]].tolist()
            assert all(ended.reason == FinishReason.LENGTH for ended in frame.finished), frame.finished
        return tokens

    def _check_mirror(self) -> None:
        """Between steps, the runner's rows are the scheduler's."""
        theirs, ours = self.core.scheduler.table, self.runner._requests.rows
        for row in np.flatnonzero(theirs.num_tokens).tolist():
            count = theirs.num_tokens[row]
            assert np.array_equal(ours.token_ids[row, :count], theirs.token_ids[row, :count])
            for name in ("num_tokens", "num_computed", "num_prompt_tokens"):
                assert getattr(ours, name)[row] == getattr(theirs, name)[row], name
            for mine, due in zip(ours.block_tables, theirs.block_tables, strict=True):
                assert np.array_equal(mine[row], due[row])
            self.compared += 1

    def _take(self, columns: PromptLogprobs | None) -> None:
        if columns is None:
            return
        indexes, positions = np.frombuffer(columns.indexes, np.int64), np.frombuffer(columns.positions, np.int32)
        logprobs = np.frombuffer(columns.logprobs, np.float32)
        for index, position, logprob in zip(indexes.tolist(), positions.tolist(), logprobs.tolist(), strict=True):
            assert self.scores.setdefault(index, {}).setdefault(position, logprob) == logprob


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "adjusted"])
def adjusted(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def alone(checkpoint, build_runner, adjusted) -> dict[int, list[int]]:
    """Each request's tokens with nobody else there and nothing cached."""
    tokens: dict[int, list[int]] = {}
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    for request in requests(adjusted):
        engine = Engine(runner, depth=1, num_blocks=100)
        tokens |= engine.run([request])
    return tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [100, 22])
@pytest.mark.req("CHK-05", "SMP-13", "SMP-17", "MR-04")
def test_a_crowd_gets_what_each_gets_alone(checkpoint, build_runner, alone, adjusted, depth, num_blocks):
    engine = Engine(build_runner(checkpoint("llama"), scheduler=SCHEDULER), depth, num_blocks)
    try:
        assert engine.run(requests(adjusted)) == alone
        stats = engine.core.stats()
        assert stats.prefix_hits > 0
        assert (stats.preemptions > 0) == (num_blocks == 22)
        assert engine.compared > 50 or depth == 2
    finally:
        engine.executor.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.req("LP-01")
def test_prompt_logprobs_bypass_what_is_cached(checkpoint, build_runner, depth):
    """Every prompt token is scored, before and after the prefix is cached, in chunks and through preemptions; the outputs are
    those of requests that do not ask, which find the cache as ever."""
    plain = requests(adjusted=False)
    asking = [
        msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=1))
        for request in plain
    ]
    engine = Engine(build_runner(checkpoint("llama"), scheduler=SCHEDULER), depth, num_blocks=22)
    try:
        tokens, first = engine.run(asking), dict(engine.scores)
        assert engine.core.stats().preemptions > 0 and engine.core.stats().prefix_hits == 0
        assert {index: sorted(found) for index, found in first.items()} == {
            request.index: [*range(1, len(request.prompt_token_ids))] for request in plain
        }
        assert engine.run(plain) == tokens and engine.core.stats().prefix_hits > 0
        engine.scores.clear()
        assert engine.run(asking[3:]) == {index: found for index, found in tokens.items() if index >= 3}
        assert engine.scores == {index: found for index, found in first.items() if index >= 3}
    finally:
        engine.executor.close()


def test_the_adjustments_change_every_output(checkpoint, build_runner):
    """Without that the test above would show nothing of them."""
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    greedy = SamplingParams(max_tokens=OUTPUTS, temperature=0.0)
    for request in requests(adjusted=True):
        plain = msgspec.structs.replace(request, sampling=greedy)
        tokens = [Engine(runner, depth=1, num_blocks=100).run([each])[request.index] for each in (request, plain)]
        assert (tokens[0] == tokens[1]) == (request.sampling == greedy)


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_without_rows_pass_through_and_change_nothing(checkpoint, build_runner, alone, adjusted, depth):
    """Before, between and after the steps of requests: as a connector asks for them, or a rank that keeps step with others."""
    engine = Engine(build_runner(checkpoint("llama"), scheduler=SCHEDULER), depth, 100)
    scheduler, retired, turns = engine.core.scheduler, [], count()
    schedule, update = scheduler.schedule, scheduler.update
    scheduler.schedule = lambda now: schedule(now, idle=next(turns) % 3 < 2)
    scheduler.update = lambda result, now: retired.append(len(result.counts)) or update(result, now)
    try:
        for _ in range(3):
            assert engine.core.step() is None
        assert engine.run(requests(adjusted)[:4]) == {index: alone[index] for index in range(4)}
        for _ in range(3):
            engine.core.step()
        assert retired[:2] == retired[-2:] == [0, 0] and len(retired) - retired.count(0) >= OUTPUTS
        stats = engine.core.stats()
        assert sum(stats.step.seconds.counts) == len(retired) - retired.count(0), "a plan without rows is no step of the model"
        assert stats.steps == len(retired)
    finally:
        engine.core.close()
