"""Messages between a core's port and a frontend's inbox: in order, whole, and without either waiting for the other."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from harness import make_request

from penstock.engine import messages
from penstock.engine.core.ipc.inbox import Inbox
from penstock.engine.core.ipc.ports import SharedPort, SinglePort
from penstock.engine.core.ipc.sockets import Context
from penstock.engine.messages import (
    FRONTEND_SHIFT,
    ControlDone,
    CoreInput,
    CoreReady,
    FrontendJoined,
    FrontendLeft,
    StepOutputs,
)

LARGE = list(range(500_000))
"""Tokens of a message that is more than a socket takes at once."""
READY = CoreReady(1, 8, 9, {})


def frame(step: int, tokens: list[int], frontend: int = 0) -> StepOutputs:
    """Tokens of one request."""
    indexes, offsets = np.array([frontend << FRONTEND_SHIFT], "<i8"), np.array([0, len(tokens)], "<i4")
    return StepOutputs(0, step, 0.0, indexes.tobytes(), offsets.tobytes(), np.array(tokens, "<i4").tobytes(), [], [])


def said(inbox: Inbox, message: CoreInput) -> None:
    """As a client says it."""
    inbox.send(messages.encode(message))


async def heard(inbox: Inbox) -> object:
    """As a client hears it."""
    payload = await asyncio.wait_for(inbox.next(), 60)
    return None if payload is None else messages.decode_output(payload)


async def received(port: SinglePort, count: int) -> list[CoreInput]:
    """What has reached the core, once it is so many messages."""
    found: list[CoreInput] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            await asyncio.sleep(0)
            found += port.receive() if port.poll(1) else []
    return found


@pytest.fixture
def context() -> Context:
    return Context()


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    inbox = Inbox()
    inbox.bind(str(tmp_path / "core"))
    yield inbox
    inbox.close()


@pytest.fixture
async def port(tmp_path: Path, inbox: Inbox, context: Context) -> AsyncIterator[SinglePort]:
    yield SinglePort(context, str(tmp_path / "core"))
    await asyncio.to_thread(context.destroy, linger=0)


@pytest.fixture
async def shared(tmp_path: Path, inbox: Inbox, context: Context) -> AsyncIterator[SharedPort]:
    yield SharedPort(context, str(tmp_path / "core"), str(tmp_path / "frontends"))
    await asyncio.to_thread(context.destroy, linger=0)


@pytest.mark.req("IPC-02")
async def test_messages_come_in_order(inbox: Inbox, port: SinglePort) -> None:
    outputs = [frame(step, [step]) for step in range(100)]
    for output in outputs:
        port.send(output)
    assert [await heard(inbox) for _ in outputs] == outputs
    inputs = [make_request(index, [index], 2) for index in range(100)]
    for request in inputs:
        said(inbox, request)
    assert await received(port, len(inputs)) == inputs


async def test_a_waiting_reader_is_woken(inbox: Inbox, port: SinglePort) -> None:
    reading = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    port.send(frame(1, [7]))
    assert await asyncio.wait_for(reading, 60) == messages.encode(frame(1, [7]))


async def test_a_reader_is_woken_by_what_came_while_it_sent(inbox: Inbox, port: SinglePort) -> None:
    """Sending uses up the descriptor's edge, by which the loop would hear of a message."""
    port.send(frame(0, [0]))
    await heard(inbox)
    for step in range(1, 300):
        port.send(frame(step, [step]))
        said(inbox, make_request(step, [1], 2))
        assert await heard(inbox) == frame(step, [step])


async def test_a_frontend_that_does_not_read_holds_nobody_up_and_loses_nothing(inbox: Inbox, port: SinglePort) -> None:
    outputs = [frame(0, LARGE), *(frame(step, [step]) for step in range(1, 5000)), frame(5000, LARGE)]
    for output in outputs:
        port.send(output)  # returns, though nobody reads
    assert [await heard(inbox) for _ in outputs] == outputs


async def test_a_core_that_does_not_read_holds_nobody_up_and_loses_nothing(inbox: Inbox, port: SinglePort) -> None:
    port.send(frame(0, [0]))
    await heard(inbox)  # both ends have met
    inputs = [make_request(0, LARGE, 2), *(make_request(index, [1], 2) for index in range(1, 5000))]
    for request in inputs:
        said(inbox, request)
    assert await received(port, len(inputs)) == inputs


async def test_last_words_reach_who_reads_late(inbox: Inbox, port: SinglePort, context: Context) -> None:
    port.send(frame(0, LARGE))
    finishing = asyncio.create_task(asyncio.to_thread(context.destroy, linger=60_000))
    assert await heard(inbox) == frame(0, LARGE)
    await finishing


async def test_who_sends_to_nobody_is_told(inbox: Inbox) -> None:
    with pytest.raises(ConnectionError, match="nobody"):
        inbox.send(b"early")
    inbox.close()
    with pytest.raises(ConnectionError, match="closed"):
        inbox.send(b"late")


async def test_a_path_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    inbox = Inbox()
    with pytest.raises(OSError, match="/core"):
        inbox.bind(str(tmp_path / "missing" / "core"))
    inbox.close()


@pytest.mark.req("EG-13")
async def test_a_backlog_lets_others_have_their_turn(inbox: Inbox, port: SinglePort) -> None:
    for step in range(50):
        port.send(frame(step, [step]))
    turns = 0

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(neighbour())
    for _ in range(50):
        await heard(inbox)
    task.cancel()
    assert turns >= 49


async def test_what_has_come_is_read_before_the_end(inbox: Inbox, port: SinglePort) -> None:
    port.send(frame(1, [1]))
    while not inbox._messages:
        await asyncio.sleep(0)
    inbox.end()
    assert await heard(inbox) == frame(1, [1])
    assert await heard(inbox) is None


async def test_each_frontend_hears_what_concerns_it(tmp_path: Path, inbox: Inbox, shared: SharedPort) -> None:
    shared.send(READY)
    others = {number: Inbox() for number in (1, 2)}
    for number, other in others.items():
        other.connect(str(tmp_path / "frontends"))
        said(other, FrontendJoined(number))
    assert await received_nothing_until(shared, 2) == []
    assert [await heard(one) for one in (inbox, *others.values())] == [READY] * 3
    both = msgspec.structs.replace(
        frame(1, [7, 8]),
        indexes=np.array([1 << FRONTEND_SHIFT, 2 << FRONTEND_SHIFT], "<i8").tobytes(),
        offsets=np.array([0, 1, 2], "<i4").tobytes(),
    )
    shared.send(both)
    assert [await heard(others[number]) for number in (1, 2)] == [frame(1, [7], 1), frame(1, [8], 2)]
    shared.send(ControlDone(2 << FRONTEND_SHIFT, None, None))
    assert await heard(others[2]) == ControlDone(2 << FRONTEND_SHIFT, None, None)
    for other in others.values():
        other.close()


async def test_a_frontend_that_left_is_neither_heard_nor_told(tmp_path: Path, inbox: Inbox, shared: SharedPort) -> None:
    other = Inbox()
    other.connect(str(tmp_path / "frontends"))
    said(other, FrontendJoined(1))
    await received_nothing_until(shared, 1)
    shared.send(READY)
    assert await heard(inbox) == await heard(other) == READY
    said(inbox, FrontendLeft(1))
    assert await received(shared, 1) == [FrontendLeft(1)]
    said(other, make_request(1 << FRONTEND_SHIFT, [1], 2))
    said(other, FrontendJoined(1))  # it was about to
    said(inbox, make_request(0, [1], 2))
    assert await received(shared, 1) == [make_request(0, [1], 2)]
    shared.send(frame(2, [1], 1))
    other.close()
    shared.send(frame(3, [1], 1))  # to nobody, and without an error
    shared.send(frame(4, [1]))
    assert await heard(inbox) == frame(4, [1])


async def received_nothing_until(port: SharedPort, joined: int) -> list[CoreInput]:
    """What has come by the time so many frontends have joined."""
    found: list[CoreInput] = []
    async with asyncio.timeout(60):
        while len(port._joined) < joined:
            await asyncio.sleep(0)
            found += port.receive() if port.poll(1) else []
    return found
