"""The keyed queue."""

import asyncio
from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from penstock.kube.backoff import Backoff
from penstock.operator.queue import KeyedQueue


async def run(queue: KeyedQueue[str], handle: "object", seconds: float, workers: int = 3) -> None:
    """Works for a while."""
    tasks = [asyncio.create_task(queue.work(handle)) for _ in range(workers)]  # type: ignore[arg-type]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_key_that_is_added_twice_is_handled_once() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    handled: list[str] = []

    async def handle(key: str) -> None:
        handled.append(key)

    for key in ("a", "a", "b", "a"):
        queue.add(key)
    await run(queue, handle, 0.05)
    assert sorted(handled) == ["a", "b"]


async def test_one_key_is_never_handled_twice_at_a_time_and_a_change_meanwhile_is_not_lost() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    active: Counter[str] = Counter()
    handled: Counter[str] = Counter()

    async def handle(key: str) -> None:
        active[key] += 1
        assert active[key] == 1
        if handled[key] < 3:
            queue.add(key)
        await asyncio.sleep(0.01)
        active[key] -= 1
        handled[key] += 1

    queue.add("a")
    queue.add("b")
    await run(queue, handle, 0.3)
    assert handled == {"a": 4, "b": 4}


async def test_a_failure_comes_back_later_and_stops_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    queue: KeyedQueue[str] = KeyedQueue(lambda: Backoff(first=0.02, longest=1.0, random=Random(1)))
    times: list[float] = []
    good: list[str] = []

    async def handle(key: str) -> None:
        if key == "bad":
            times.append(asyncio.get_running_loop().time())
            if len(times) < 4:
                raise RuntimeError("no luck")
        else:
            good.append(key)

    queue.add("bad")
    queue.add("good")
    await run(queue, handle, 0.5, workers=1)
    assert good == ["good"]
    assert len(times) == 4
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[0] >= 0.01
    assert gaps[2] > gaps[0]
    assert "no luck" in caplog.text


async def test_a_change_does_not_wait_for_the_delay() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    handled: list[str] = []

    async def handle(key: str) -> None:
        handled.append(key)

    queue.add_after("a", 60.0)
    queue.add("a")
    await run(queue, handle, 0.05)
    assert handled == ["a"]
