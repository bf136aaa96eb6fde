"""The line that the log says every ten seconds."""

import asyncio
import logging

import msgspec
import pytest

from penstock.engine.frontend.observe.log_stats import Snapshot, describe, log_stats
from penstock.engine.frontend.observe.metrics import EngineMetrics

BEFORE = Snapshot(
    prompt_tokens=1000,
    cached_tokens=100,
    generation_tokens=50,
    preemptions=1,
    steps=10,
    step_seconds=1.0,
    running=9,
    kv_usage=0.9,
)


def after(**changes: object) -> Snapshot:
    return msgspec.structs.replace(BEFORE, **changes)


def test_the_line_is_of_the_period_alone():
    now = after(
        prompt_tokens=3000, cached_tokens=600, generation_tokens=1050, preemptions=4, steps=110, step_seconds=1.8, running=7,
        waiting={"capacity": 3}, kv_usage=0.4321,
    )  # fmt: skip
    assert describe(BEFORE, now, 10.0) == (
        "prompt 200.0 tok/s, generation 100.0 tok/s, running 7, waiting 3, KV 43.2%, "
        "prefix hits 25.0%, step 8.00 ms, preemptions 3"
    )


def test_where_the_ceilings_are_known_a_step_is_held_to_them():
    before, now = after(floor_seconds=0.7), after(floor_seconds=0.98, steps=60, step_seconds=1.4)
    assert "step 8.00 ms (70% of the roofline)" in str(describe(before, now, 10.0))


def test_drafts_are_told_with_their_acceptance():
    line = describe(BEFORE, after(drafted=40, accepted=30, steps=20, step_seconds=1.01), 5.0)
    assert line is not None and line.endswith("step 1.00 ms, drafts accepted 75.0% of 40")


def test_what_did_not_happen_is_not_said():
    line = describe(BEFORE, after(generation_tokens=60, steps=20, step_seconds=1.01), 5.0)
    assert line == "prompt 0.0 tok/s, generation 2.0 tok/s, running 9, waiting 0, KV 90.0%, step 1.00 ms"
    idle = after(running=0, kv_usage=0.0)
    assert describe(idle, idle, 10.0) is None


def test_waits_for_other_things_than_room_are_named():
    line = describe(BEFORE, after(waiting={"lora": 2, "capacity": 1}), 10.0)
    assert line is not None and "waiting 3 (capacity 1, lora 2)," in line


async def test_the_log_says_it_only_when_something_happened(caplog: pytest.LogCaptureFixture):
    metrics = EngineMetrics("m")
    with caplog.at_level(logging.INFO):
        task = asyncio.create_task(log_stats(metrics, period=0.01))
        await asyncio.sleep(0.05)
        assert not caplog.messages
        metrics.prompt_tokens.add(5, "computed")
        async with asyncio.timeout(60):
            while not caplog.messages:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
    assert len(caplog.messages) == 1 and "prefix hits 0.0%" in caplog.messages[0]
