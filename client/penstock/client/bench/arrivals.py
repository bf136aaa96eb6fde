"""When requests are sent."""

import asyncio
import itertools
import math
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")


def arrival_times(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield endless arrival times in seconds after the start: sums of gamma-distributed gaps of shape `burstiness` and mean 1 /
    `rate`.

    Args:
        rate: Requests per second; infinity sends all at once.
        burstiness: 1 is a Poisson process, less is burstier, more is smoother: the gaps' coefficient of variation is
            1 / sqrt(burstiness).
    """
    if math.isinf(rate):
        return itertools.repeat(0.0)
    scale = 1 / (rate * burstiness)
    return itertools.accumulate(rng.gamma(burstiness, scale) for _ in itertools.count())


async def drive(
    timed: Iterable[tuple[float, _T]],
    send: Callable[[float, _T], Coroutine[None, None, None]],
    max_concurrency: int | None = None,
) -> None:
    """Sends each request at its time, or as soon after it as fewer than `max_concurrency` run; returns when all are done.

    Args:
        timed: Seconds after the start, ascending, and a request. Read as late as possible, so that it may make requests on the
            fly or end by the clock.
        send: Gets the moment that was meant, by `time.perf_counter`, and the request. Must not raise.
        max_concurrency: None: no limit.
    """
    slots = asyncio.Semaphore(max_concurrency or sys.maxsize)
    requests = iter(timed)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as running:
        while True:
            await slots.acquire()
            following = next(requests, None)
            if following is None:
                return
            due = start + following[0]
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            running.create_task(send(due, following[1])).add_done_callback(lambda _: slots.release())
