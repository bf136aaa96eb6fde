"""What the core says is enough to know the state of every request."""

import numpy as np
import pytest
from fake_runner import FakeRunner, reference
from harness import make_config, make_request

from penstock.engine import messages
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import InlineExecutor
from penstock.engine.messages import AbortRequests, FinishReason, LifecycleEvent, StepOutputs


class Replica:
    """States rebuilt from recorded bytes alone."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.last: dict[int, LifecycleEvent] = {}
        self.ended: dict[int, FinishReason] = {}

    def take(self, data: bytes) -> None:
        frame = messages.decode_output(data)
        assert isinstance(frame, StepOutputs)
        if frame.lifecycle is not None:
            events = np.frombuffer(frame.lifecycle.events, "u1").tolist()
            for index, event in zip(np.frombuffer(frame.lifecycle.indexes, "<i8").tolist(), events, strict=True):
                self.last[index] = LifecycleEvent(event)
        tokens, offsets = np.frombuffer(frame.token_ids, "<i4"), np.frombuffer(frame.offsets, "<i4")
        for at, index in enumerate(np.frombuffer(frame.indexes, "<i8").tolist()):
            self.tokens.setdefault(index, []).extend(tokens[offsets[at] : offsets[at + 1]].tolist())
        self.ended |= {end.index: end.reason for end in frame.finished}

    def count(self, *events: LifecycleEvent) -> int:
        return sum(event in events for index, event in self.last.items() if index not in self.ended)


@pytest.mark.req("IPC-13")
def test_every_state_can_be_rebuilt_from_the_recorded_stream():
    config = make_config(num_blocks=18, max_num_seqs=6, budget=24)
    runner = FakeRunner(config)
    runner.initialize_kv_cache(18)
    core, replica = EngineCore(config, InlineExecutor(runner), 18, epoch=7), Replica()
    prompts = {index: [index, 5, 6, 7] * 2 for index in range(12)}
    for index, prompt in prompts.items():
        core.handle(make_request(index, prompt, 14))
    for step in range(400):
        if step == 5:
            core.handle(AbortRequests([1, 9]))
        if frame := core.step():
            replica.take(messages.encode(frame))
        assert replica.count(LifecycleEvent.SCHEDULED) == core.scheduler.num_running
        waiting = replica.count(LifecycleEvent.QUEUED, LifecycleEvent.PREEMPTED)
        assert waiting == sum(core.scheduler.waiting().values())
        if not core.has_work:
            break
    assert core.scheduler.totals.num_preemptions > 0 and len(replica.ended) == 12
    assert replica.ended.pop(1) == replica.ended.pop(9) == FinishReason.ABORT
    for index, reason in replica.ended.items():
        assert reason is FinishReason.LENGTH and replica.tokens[index] == reference(prompts[index], 14)
