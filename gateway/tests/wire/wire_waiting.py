"""Waiting for what processes will come to."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp


async def eventually(holds: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """What `holds` gives once it gives something."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                if found := await holds():
                    return found
            except (OSError, aiohttp.ClientError):
                pass  # not up yet
            await asyncio.sleep(0.05)
