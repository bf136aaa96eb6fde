"""Tasks of a process that lives as long as all of them."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until(stop: asyncio.Event, *running: Coroutine[Any, Any, object]) -> None:
    """Runs all until `stop`, or until the first of them ends; where that one has failed, its error is raised.

    The others are cancelled, and have ended when this returns; so it is when this is cancelled.
    """
    tasks = [asyncio.create_task(one) for one in (*running, stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
