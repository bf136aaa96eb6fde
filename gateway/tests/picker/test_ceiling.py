"""The gateway refuses by name what would be too much for it, and counts right whatever becomes of requests."""

import asyncio
from typing import Any

from penstock.gateway.extproc.ceiling import Ceiling


async def test_too_many_streams_and_too_many_bytes_are_503_by_name(world: Any) -> None:
    await world.ready()
    ceiling: Ceiling = world.gateway._extproc.ceiling
    ceiling._most_streams, ceiling._most_bytes = 2, 5_000
    first, second = world.stream(), world.stream()
    for stream in (first, second):
        assert world.destinations(await stream.ask(world.completion()))
    assert (ceiling.streams, ceiling.bytes) == (2, 0)  # their bodies have gone on
    status, reason, content, sets = world.error(await world.stream().ask(world.completion()))
    assert (status, reason, content["type"], sets["retry-after"]) == (503, "gateway_overloaded", "server_error", "1")
    await first.respond()
    await first.end()
    second.call.cancel()
    await world.until(lambda: ceiling.streams == 0)
    status, reason, *_ = world.error(await world.stream().ask(world.completion(prompt="x" * 6_000)))
    assert (status, reason) == (503, "gateway_overloaded")
    await world.until(lambda: (ceiling.streams, ceiling.bytes) == (0, 0))
    async with world.http.get("/metrics") as response:
        assert 'penstock_picker_refusals_total{reason="gateway_overloaded"} 2.0' in await response.text()


async def test_bodies_that_wait_count(world: Any) -> None:
    world.fleet(hold_timeout_s=60.0)
    await world.until(lambda: world.state.directory.names.get("tiny"))
    ceiling: Ceiling = world.gateway._extproc.ceiling
    stream = world.stream()
    asked = asyncio.create_task(stream.ask(world.completion()))
    await world.until(lambda: world.state.held and ceiling.bytes > 100)
    asked.cancel()
    stream.call.cancel()
    await world.until(lambda: (ceiling.streams, ceiling.bytes) == (0, 0))
