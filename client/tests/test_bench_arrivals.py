"""When requests are sent, and how many at a time."""

import asyncio
import itertools
import math
import time

import numpy as np
import pytest

from penstock.client.bench.arrivals import arrival_times, drive


@pytest.mark.req("MET-10")
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    times = list(itertools.islice(arrival_times(5.0, burstiness, np.random.default_rng(0)), 40_000))
    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)
    assert gaps.min() >= 0


@pytest.mark.req("MET-10")
def test_burstiness_one_is_a_poisson_process() -> None:
    """Exponential gaps: equal counts in the quarters of their distribution."""
    times = list(itertools.islice(arrival_times(2.0, 1.0, np.random.default_rng(1)), 40_000))
    gaps = np.diff([0.0, *times])
    quartiles = -np.log(1 - np.array([0.25, 0.5, 0.75])) / 2
    assert [(gaps < bound).mean() for bound in quartiles] == pytest.approx([0.25, 0.5, 0.75], abs=0.01)


def test_a_seed_fixes_the_times_and_infinity_means_now() -> None:
    def three(seed: int, rate: float = 1.0) -> list[float]:
        return list(itertools.islice(arrival_times(rate, 1.0, np.random.default_rng(seed)), 3))

    assert three(3) == three(3) != three(4)
    assert three(3, math.inf) == [0.0, 0.0, 0.0]


async def test_no_more_run_than_allowed_and_as_many_as_that() -> None:
    running, peak, order = 0, 0, []
    full = asyncio.Event()

    async def send(due: float, request: int) -> None:
        nonlocal running, peak
        order.append(request)
        running += 1
        peak = max(peak, running)
        if running == 4:
            full.set()
        await asyncio.wait_for(full.wait(), 60)
        await asyncio.sleep(0.001 * (request % 3))
        running -= 1

    await drive(((0.0, number) for number in range(20)), send, max_concurrency=4)
    assert (running, peak, order) == (0, 4, list(range(20)))


async def test_requests_leave_at_their_times_whatever_the_answers_do() -> None:
    never, left = asyncio.Event(), []

    async def send(due: float, request: int) -> None:
        left.append((due, time.perf_counter()))
        if len(left) == 3:
            never.set()
        await never.wait()

    await drive([(0.0, 0), (0.02, 1), (0.05, 2)], send)
    start = left[0][0]
    assert [due - start for due, _ in left] == pytest.approx([0.0, 0.02, 0.05])
    assert all(sent >= due for due, sent in left)


async def test_requests_are_made_only_when_there_is_room_for_them() -> None:
    made, done = [], []

    def making():
        for number in range(5):
            made.append(number)
            assert len(made) - len(done) <= 2
            yield 0.0, number

    async def send(due: float, request: int) -> None:
        await asyncio.sleep(0)
        done.append(request)

    await drive(making(), send, max_concurrency=2)
    assert done == made == list(range(5))


async def test_cancelling_ends_what_runs() -> None:
    began, ended = [], []

    async def send(due: float, request: int) -> None:
        began.append(request)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(request)
            raise

    task = asyncio.create_task(drive([(0.0, 0), (0.0, 1), (60.0, 2)], send))
    async with asyncio.timeout(60):
        while len(began) < 2:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == [0, 1]
