"""Messages that one process writes once for several, through shared memory."""

import random
import resource
import socket
import time

import pytest
from forked_ranks import Ranks

from penstock.engine.config import ConfigError
from penstock.engine.parallel.broadcast import Ring, Writer, messages


def test_every_reader_gets_every_message_of_any_size_in_order():
    draw = random.Random(1)
    sizes = [0, 1, 63, 64, 512, 4096, 10_000, *(draw.randrange(3000) for _ in range(300))]
    sent = [draw.randbytes(size) for size in sizes if size]
    ring, pairs = Ring.create(3, size=1024), [socket.socketpair() for _ in range(3)]

    def read(rank: int) -> list[bytes]:
        for ours, theirs in pairs:
            ours.close()
            if theirs is not pairs[rank][1]:
                theirs.close()
        found = list[bytes]()
        for message in messages(ring, rank, pairs[rank][1], bytes):
            found.append(message)
            if rank == 1 and len(found) % 100 == 0:
                time.sleep(0.02)  # the writer has to wait for it
        return found

    ranks = Ranks(3, read)
    waits = [0]
    for _, theirs in pairs:
        theirs.close()
    writer = Writer(ring, [ours for ours, _ in pairs], lambda: waits.__setitem__(0, waits[0] + 1))
    for message in sent:
        writer.send(message)
    for ours, _ in pairs:
        ours.close()
    assert ranks.results() == [sent] * 3
    assert waits[0] > 0, "the ring was never full"
    ring.close()


def test_a_message_is_decoded_where_it_lies_and_only_then_taken():
    ring, (ours, theirs) = Ring.create(1, size=256), socket.socketpair()
    seen, taken = list[type](), list[int]()

    def decode(message: memoryview | bytes) -> bytes:
        seen.append(type(message))
        taken.append(ring.taken(0))
        return bytes(message)

    reader, writer = messages(ring, 0, theirs, decode), Writer(ring, [ours], lambda: None)
    for letter in b"abcdef":  # some of them would reach over the end
        writer.send(bytes([letter]) * 100)
        assert ring.holds_more(0)
        assert next(reader) == bytes([letter]) * 100
        assert not ring.holds_more(0)
    assert set(seen) == {memoryview} and taken == [0, 100, 200, 356, 456, 612]
    ours.close()
    assert list(reader) == []
    theirs.close()


def test_a_writer_does_not_wait_for_ever_for_a_reader_that_is_gone():
    ring, (ours, theirs) = Ring.create(1, size=256), socket.socketpair()

    def gone() -> None:
        raise ConnectionError("it is gone")

    writer = Writer(ring, [ours], gone)
    writer.send(bytes(200))
    with pytest.raises(ConnectionError, match="it is gone"):
        writer.send(bytes(200))
    theirs.close()
    ours.close()
    ring.close()


def test_no_memory_for_plans_is_refused_with_its_size():
    def life(_: int) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
        with pytest.raises(ConfigError) as error:
            Ring.create(2)
        return str(error.value)

    assert Ranks(1, life).results() == ["plans for 2 ranks need 1,048,768 bytes of shared memory: File too large"]
