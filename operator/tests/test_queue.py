"""The keyed queue."""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from penstock.kube.backoff import Backoff
from penstock.operator.queue import KeyedQueue


async def run(queue: KeyedQueue[str], handle: "object", done: Callable[[], object], workers: int = 3) -> None:
    """Works until it is done, and a little longer, in which nothing more is to come."""
    tasks = [asyncio.create_task(queue.work(handle)) for _ in range(workers)]  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
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
    await run(queue, handle, lambda: len(handled) >= 2)
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
    await run(queue, handle, lambda: handled["a"] >= 4 <= handled["b"])
    assert handled == {"a": 4, "b": 4}


async def test_a_failure_comes_back_later_and_stops_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    queue: KeyedQueue[str] = KeyedQueue(lambda: Backoff(first=0.02, longest=1.0, random=Random(1)))
    delays: list[float] = []
    tries, good = 0, list[str]()
    add_after = queue.add_after
    queue.add_after = lambda key, delay_s: (delays.append(delay_s), add_after(key, delay_s))[1]  # type: ignore[method-assign]

    async def handle(key: str) -> None:
        nonlocal tries
        if key == "bad":
            tries += 1
            if tries < 4:
                raise RuntimeError("no luck")
        else:
            good.append(key)

    queue.add("bad")
    queue.add("good")
    await run(queue, handle, lambda: tries >= 4, workers=1)
    assert (good, tries) == (["good"], 4)
    assert 0.01 <= delays[0] <= 0.02 and delays[2] > delays[0]
    assert "no luck" in caplog.text


async def test_a_change_does_not_wait_for_the_delay() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    handled: list[str] = []

    async def handle(key: str) -> None:
        handled.append(key)

    queue.add_after("a", 60.0)
    queue.add("a")
    await run(queue, handle, lambda: handled)
    assert handled == ["a"]


async def test_of_two_delays_the_shorter_counts() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    handled: list[str] = []

    async def handle(key: str) -> None:
        handled.append(key)

    queue.add_after("a", 60.0)
    queue.add_after("a", 0.0)
    queue.add_after("a", 60.0)
    await run(queue, handle, lambda: handled)
    assert handled == ["a"]
