"""Messages between a core's links and a frontend's inbox: in order, whole, and without either waiting for the other."""

import asyncio
import select
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.ipc import links as links_module
from penstock.engine.core.ipc.framing import Unframer, framed
from penstock.engine.core.ipc.inbox import Inbox
from penstock.engine.core.ipc.links import Link, Links

LARGE = bytes(range(256)) * 2**12
"""More than a socket takes at once."""


class Pair:
    """Both ends of a connection."""

    def __init__(self, inbox: Inbox, links: Links, link: Link) -> None:
        self.inbox, self.links, self.link = inbox, links, link

    def send(self, payload: bytes) -> None:
        """As the core."""
        self.links.send(self.link, payload)

    async def next(self) -> bytes | None:
        """As the frontend."""
        return await asyncio.wait_for(self.inbox.next(), 60)

    async def received(self, count: int) -> list[bytes]:
        """What has reached the core, once it is so many messages."""
        messages: list[bytes] = []
        async with asyncio.timeout(60):
            while len(messages) < count:
                await asyncio.sleep(0)
                messages += self.links.receive(self.link) if self.links.poll(0) else []
        return messages


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    ours, theirs = socket.socketpair()
    inbox, links = Inbox(), Links()
    link = links.add(theirs)
    await asyncio.get_running_loop().create_unix_connection(lambda: inbox, sock=ours)
    yield Pair(inbox, links, link)
    inbox.close()
    links.remove(link)
    await asyncio.sleep(0)


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 50)))
def test_messages_are_whole_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    unframer, stream, found = Unframer(), b"".join(map(framed, payloads)), list[bytes]()
    for cut in cuts:
        found += unframer.feed(stream[:cut])
        stream = stream[cut:]
    assert found + unframer.feed(stream) == payloads


async def test_messages_come_in_order(pair: Pair) -> None:
    sent = [b"%d" % number for number in range(100)]
    for payload in sent:
        pair.send(payload)
        pair.inbox.send(payload)
    assert [await pair.next() for _ in sent] == sent
    assert await pair.received(len(sent)) == sent


async def test_a_waiting_reader_is_woken(pair: Pair) -> None:
    reading = asyncio.create_task(pair.inbox.next())
    await asyncio.sleep(0)
    pair.send(b"late")
    assert await asyncio.wait_for(reading, 60) == b"late"


async def test_a_frontend_that_does_not_read_holds_nobody_up_and_loses_nothing(pair: Pair) -> None:
    sent = [LARGE, *(b"%d" % number for number in range(100)), LARGE]
    for payload in sent:
        pair.send(payload)  # returns, though nobody reads
    assert pair.link._unsent and not pair.links.poll(0), "nothing has come"
    assert [await pair.next() for _ in sent] == sent
    await asyncio.to_thread(pair.links.finish, 60)
    assert not pair.link._unsent and not pair.links.poll(0)


async def test_what_is_large_is_read_while_the_core_is_in_a_step(pair: Pair) -> None:
    """Nobody turns the core's side here: all of it reaches a frontend that is awake, whatever the step takes."""
    for number in range(5):
        pair.send(5 * LARGE)
        pair.send(b"small")
        assert await pair.next() == 5 * LARGE, number
        assert await pair.next() == b"small", number


async def test_a_frontend_that_does_not_read_is_left_alone_at_the_end(pair: Pair) -> None:
    pair.send(LARGE)
    pair.links.finish(0.01)
    assert pair.link._unsent
    pair.links.remove(pair.link)  # which ends the sender
    assert not pair.link._unsent


async def test_a_core_that_does_not_read_holds_nobody_up_and_loses_nothing(pair: Pair) -> None:
    sent = [LARGE] * 3
    for payload in sent:
        pair.inbox.send(payload)
    assert await pair.received(len(sent)) == sent


def test_a_large_message_is_read_in_one_turn_as_its_writer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "REST_MS", 60_000)  # however slow this machine is
    ours, theirs = socket.socketpair()
    writer = threading.Thread(target=ours.sendall, args=[framed(b"first") + framed(5 * LARGE) + framed(b"last")])
    link = Link(theirs)
    with ours, closing(link):
        writer.start()
        select.select([theirs], [], [])
        found = link.receive()
        assert found[:2] == [b"first", 5 * LARGE], "though it is many times what the socket holds"
        writer.join()
        assert found + link.receive() == [b"first", 5 * LARGE, b"last"]


def test_a_message_of_which_the_rest_does_not_come_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    with ours, closing(link):
        ours.sendall(framed(b"first") + framed(b"second")[:-1])
        assert link.receive() == [b"first"]
        assert link.receive() == [], "and is not waited for again until more of it comes"
        ours.sendall(b"d")
        assert link.receive() == [b"second"]


async def test_who_is_gone_is_noticed_and_sent_nothing(pair: Pair) -> None:
    pair.inbox.send(b"last words")
    await asyncio.sleep(0.01)
    pair.inbox.close()
    messages: list[bytes] = []
    while not pair.link.is_gone:
        await asyncio.sleep(0)
        pair.links.poll(100)
        messages += pair.links.receive(pair.link)
    assert messages == [b"last words"]
    pair.send(LARGE)
    assert not pair.link._unsent and pair.links.receive(pair.link) == [] and not pair.links.poll(0)


async def test_who_goes_while_much_waits_for_it_is_forgotten(pair: Pair) -> None:
    pair.send(LARGE)
    pair.inbox.close()
    while not pair.link.is_gone:
        await asyncio.sleep(0)
        pair.links.poll(100)
        pair.links.receive(pair.link)
    assert not pair.links.poll(0)


async def test_last_words_reach_who_reads_late(pair: Pair) -> None:
    pair.send(LARGE)
    finishing = asyncio.create_task(asyncio.to_thread(pair.links.finish, 5.0))
    assert await pair.next() == LARGE
    await finishing
    assert not pair.link._unsent


@pytest.mark.req("EG-13")
async def test_a_backlog_lets_others_have_their_turn(pair: Pair) -> None:
    for _ in range(50):
        pair.send(b"x")
    turns = 0

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(neighbour())
    for _ in range(50):
        await pair.next()
    task.cancel()
    assert turns >= 49


async def test_what_has_come_is_read_before_the_end(pair: Pair) -> None:
    pair.send(b"last words")
    await asyncio.sleep(0.01)
    pair.inbox.end()
    assert await pair.next() == b"last words"
    assert await pair.next() is None
