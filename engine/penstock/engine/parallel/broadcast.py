"""One writer's messages to several readers on one machine: each is written once, into memory that all of them share.

A reader's socket wakes it and says where the message is. The writer waits where a reader has not yet taken what would be
overwritten; a message of any length travels in parts.
"""

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from penstock.engine.config import ConfigError

RING_BYTES: Final = 1 << 20
_LINE: Final = 64
_TAKEN: Final = struct.Struct("=Q")
_BELL: Final = struct.Struct("=QI?")
"""Where a part begins, counted from the first byte ever written; its bytes; whether more of the message follows."""
_FULL_POLL_S: Final = 0.0002


class Ring:
    """The shared memory: how far each reader has come, and then the bytes.

    Args:
        fd: Its file descriptor; closed with it.
        readers: How many.
        size: Bytes of messages that fit.
    """

    def __init__(self, fd: int, readers: int, size: int = RING_BYTES) -> None:
        self.fd, self.readers, self.size = fd, readers, size
        self.map = mmap.mmap(fd, _LINE * readers + size)

    @classmethod
    def create(cls, readers: int, size: int = RING_BYTES) -> "Ring":
        """Create a ring. Raises ConfigError if there is too little memory."""
        fd, total = os.memfd_create("penstock-plans"), _LINE * readers + size
        try:
            os.posix_fallocate(fd, 0, total)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"plans for {readers} ranks need {total:,} bytes of shared memory: {error.strerror}") from error
        return cls(fd, readers, size)

    def taken(self, reader: int) -> int:
        """Bytes that a reader has taken in all."""
        return _TAKEN.unpack_from(self.map, _LINE * reader)[0]

    def take(self, reader: int, position: int) -> None:
        """A reader says how far it has come."""
        _TAKEN.pack_into(self.map, _LINE * reader, position)

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Copies in, around the end where need be."""
        at, base = position % self.size, _LINE * self.readers
        first = min(len(data), self.size - at)
        self.map[base + at : base + at + first] = data[:first]
        self.map[base : base + len(data) - first] = data[first:]

    def read(self, position: int, count: int) -> bytes:
        """Copies out."""
        at, base = position % self.size, _LINE * self.readers
        first = min(count, self.size - at)
        return self.map[base + at : base + at + first] + self.map[base : base + count - first]

    def close(self) -> None:
        """Lets go of it; safe to call twice."""
        if not self.map.closed:
            self.map.close()
            os.close(self.fd)


class Writer:
    """The one that writes.

    Args:
        ring: Shared with the readers.
        bells: The sockets to them, in their order.
        wait: Called again and again while the ring is full; raises where a reader will never come.
    """

    def __init__(self, ring: Ring, bells: Sequence[socket.socket], wait: Callable[[], None]) -> None:
        self._ring, self._bells, self._wait = ring, bells, wait
        self._position = 0

    def send(self, message: bytes) -> None:
        """Send a message to all readers. Raises `OSError` if one is gone."""
        data, most = memoryview(message), self._ring.size // 2
        for at in range(0, len(data), most):
            part = data[at : at + most]
            while self._position + len(part) - min(map(self._ring.taken, range(self._ring.readers))) > self._ring.size:
                self._wait()
                time.sleep(_FULL_POLL_S)
            self._ring.write(self._position, part)
            bell = _BELL.pack(self._position, len(part), at + most < len(data))
            for socket_ in self._bells:
                socket_.sendall(bell)
            self._position += len(part)


def messages(ring: Ring, reader: int, bell: socket.socket) -> Iterator[bytes]:
    """What the writer sends to one reader, until the writer closes its socket."""
    parts = list[bytes]()
    while rung := bell.recv(_BELL.size, socket.MSG_WAITALL):
        position, size, more = _BELL.unpack(rung)
        parts.append(ring.read(position, size))
        ring.take(reader, position + size)
        if not more:
            yield parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
