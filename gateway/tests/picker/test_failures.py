"""Replicas that stop, go on, or fail, as the picker sees them over its own connections."""

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.api import headers
from penstock.gateway.picker.candidates import key_of


async def burst(world: Any, count: int) -> dict[str, list[Any]]:
    """The streams of `count` requests at once, none of them answered yet, by where they are sent."""
    streams = [world.stream() for _ in range(count)]
    answers = await asyncio.gather(*(stream.ask(world.completion()) for stream in streams))
    sent: dict[str, list[Any]] = {replica.endpoint: [] for replica in world.replicas}
    for stream, answer in zip(streams, answers, strict=True):
        sent[world.destinations(answer)[0]].append(stream)
    return sent


async def test_a_stopped_replica_is_not_picked_and_meets_no_herd_when_it_goes_on(world: Any) -> None:
    await world.ready()
    stopped, other = world.replicas
    world.engines[0].going.clear()
    world.engines[1].report = msgspec.structs.replace(world.engines[1].report, num_requests_running=7, seq=2)
    await world.until(lambda: world.state.outliers.ejections)  # within seconds: silence, then a poll without an answer
    assert len((await burst(world, 10))[other.endpoint]) == 10
    world.engines[0].going.set()
    heard = world.state.reports.get(key_of(stopped)).at
    await world.until(lambda: world.state.reports.get(key_of(stopped)).at > heard)
    (first,) = (await burst(world, 10))[stopped.endpoint]
    await first.respond(served=stopped.endpoint)
    assert len((await burst(world, 10))[stopped.endpoint]) == 2


@pytest.mark.parametrize("mark", [{}, {headers.RETRIABLE: "true"}])
async def test_a_replica_that_answers_with_errors_is_spared(world: Any, mark: dict[str, str]) -> None:
    """Again and again; or once, where it says that it is full."""
    await world.ready()
    failing, other = world.replicas
    busy = msgspec.structs.replace(world.engines[1].report, num_requests_running=7, seq=2)
    world.engines[1].report = busy
    await world.until(lambda: world.state.reports.get(key_of(other)).report == busy)
    for _ in range(1 if mark else 5):
        stream = world.stream()
        assert world.destinations(await stream.ask(world.completion()))[0] == failing.endpoint
        await stream.respond(500 if not mark else 503, served=failing.endpoint, **mark)
    assert len((await burst(world, 5))[other.endpoint]) == 5
