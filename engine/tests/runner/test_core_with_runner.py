"""The real scheduler, cache and runner together: requests get the same tokens alone and in a crowd that is chunked, cached,
preempted and planned ahead."""

import msgspec
import numpy as np
import pytest

from penstock.engine.config import SchedulerConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import InlineExecutor, ThreadExecutor
from penstock.engine.messages import AddRequest, FinishReason
from penstock.engine.sampling import SamplingParams

VOCAB, OUTPUTS = 257, 24
SCHEDULER = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, watermark=0.0)


def requests() -> list[AddRequest]:
    """Ten, some with a common prefix, greedy and random in turn."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB, 64).tolist()
    found = []
    for index in range(10):
        tail = rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist()
        sampling = SamplingParams(max_tokens=OUTPUTS, temperature=0.9 * (index % 2), top_p=0.9, seed=index)
        found.append(AddRequest(index, f"r{index}", common * (index % 3 > 0) + tail, sampling, float(index)))
    return found


class Engine:
    """A core on a runner of its own, with room for about two of the requests where blocks are few."""

    def __init__(self, runner, depth: int, num_blocks: int) -> None:
        runner.warm_up()
        self.executor = InlineExecutor(runner) if depth == 1 else ThreadExecutor(runner)
        self.core = EngineCore(msgspec.structs.replace(runner.config, depth=depth), self.executor, num_blocks, epoch=1)

    def run(self, batch: list[AddRequest]) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {request.index: [] for request in batch}
        for request in batch:
            self.core.handle(request)
        while self.core.has_work:
            frame = self.core.step()
            if frame is None:
                continue
            offsets, ids = np.frombuffer(frame.offsets, np.int32), np.frombuffer(frame.token_ids, np.int32)
            for i, index in enumerate(np.frombuffer(frame.indexes, np.int64).tolist()):
                tokens[index] += ids[offsets[i] : offsets[i + 1]].tolist()
            assert all(ended.reason == FinishReason.LENGTH for ended in frame.finished), frame.finished
        return tokens


@pytest.fixture(scope="module")
def alone(checkpoint, build_runner) -> dict[int, list[int]]:
    """Each request's tokens with nobody else there and nothing cached."""
    tokens: dict[int, list[int]] = {}
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    for request in requests():
        engine = Engine(runner, depth=1, num_blocks=100)
        tokens |= engine.run([request])
    return tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [100, 22])
@pytest.mark.req("CHK-05", "SMP-13")
def test_a_crowd_gets_what_each_gets_alone(checkpoint, build_runner, alone, depth, num_blocks):
    engine = Engine(build_runner(checkpoint("llama"), scheduler=SCHEDULER), depth, num_blocks)
    try:
        assert engine.run(requests()) == alone
        stats = engine.core.stats()
        assert stats.prefix_hits > 0
        assert (stats.preemptions > 0) == (num_blocks == 22)
    finally:
        engine.executor.close()
