"""Engines on a device runner over CPU tensors, whose copies come late, against engines on a CPU's."""

from typing import Any

import msgspec
import numpy as np
import pytest
from test_core_with_runner import SCHEDULER, requests

from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import executor_of
from penstock.engine.messages import AddRequest, Finished, StepOutputs

VOCAB = 257


class Engine:
    """A core on a runner, and what its requests got."""

    def __init__(self, runner: Any, depth: int, num_blocks: int) -> None:
        runner.warm_up()
        self.runner = runner
        config = msgspec.structs.replace(runner.config, depth=depth)
        self.executor = executor_of(config, runner)
        self.core = EngineCore(config, self.executor, num_blocks, epoch=1, groups=runner.kv_layout().groups)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.frames: list[StepOutputs] = []

    def step(self) -> None:
        frame = self.core.step()
        if frame is None:
            return
        self.frames.append(frame)
        offsets, ids = np.frombuffer(frame.offsets, np.int32), np.frombuffer(frame.token_ids, np.int32)
        for at, index in enumerate(np.frombuffer(frame.indexes, np.int64).tolist()):
            self.tokens.setdefault(index, []).extend(ids[offsets[at] : offsets[at + 1]].tolist())
        self.finished |= {ended.index: ended for ended in frame.finished}

    def run(self, batch: list[AddRequest]) -> dict[int, list[int]]:
        for request in batch:
            self.core.handle(request)
        while self.core.has_work:
            self.step()
        return self.tokens


@pytest.fixture(scope="module")
def expected(checkpoint, build_runner):
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER, form="reference")
    return Engine(runner, 1, 100).run(requests(adjusted=False))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [100, 22])
def test_a_device_gives_the_tokens_of_a_cpu(checkpoint, build_device_runner, expected, depth, num_blocks):
    engine = Engine(build_device_runner(checkpoint("llama"), scheduler=SCHEDULER, depth=depth), depth, num_blocks)
    assert engine.run(requests(adjusted=False)) == expected
    stats = engine.core.stats()
    assert stats.prefix_hits > 0
    assert (stats.preemptions > 0) == (num_blocks == 22)
