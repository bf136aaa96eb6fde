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
from typing import Final, TypeVar

from penstock.engine.config import ConfigError

RING_BYTES: Final = 1 << 20
T = TypeVar("T")
_LINE: Final = 64
_MARK: Final = struct.Struct("=Q")
_BELL: Final = struct.Struct("=QI?")
"""Where a part begins, counted from the first byte ever written; its bytes; whether more of the message follows."""
_FULL_POLL_S: Final = 0.0002


class Ring:
    """The shared memory: how far each reader has come, how far the writer, and then the bytes.

    Args:
        fd: Its file descriptor; closed with it.
        readers: How many.
        size: Bytes of messages that fit.
    """

    def __init__(self, fd: int, readers: int, size: int = RING_BYTES) -> None:
        self.fd, self.readers, self.size = fd, readers, size
        self._base = _LINE * (readers + 1)
        self.map = mmap.mmap(fd, self._base + size)

    @classmethod
    def create(cls, readers: int, size: int = RING_BYTES) -> "Ring":
        """Create a ring. Raises ConfigError if there is too little memory."""
        fd, total = os.memfd_create("penstock-plans"), _LINE * (readers + 1) + size
        try:
            os.posix_fallocate(fd, 0, total)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"plans for {readers} ranks need {total:,} bytes of shared memory: {error.strerror}") from error
        return cls(fd, readers, size)

    def taken(self, reader: int) -> int:
        """Bytes that a reader has taken in all."""
        return _MARK.unpack_from(self.map, _LINE * reader)[0]

    def take(self, reader: int, position: int) -> None:
        """A reader says how far it has come."""
        _MARK.pack_into(self.map, _LINE * reader, position)

    def holds_more(self, reader: int) -> bool:
        """Whether something has been written that a reader has yet to take."""
        return self.taken(reader) < _MARK.unpack_from(self.map, _LINE * self.readers)[0]

    def write(self, position: int, data: memoryview) -> None:
        """Copies in what does not reach over the end, and says so."""
        at = self._base + position % self.size
        self.map[at : at + len(data)] = data
        _MARK.pack_into(self.map, _LINE * self.readers, position + len(data))

    def view(self, position: int, count: int) -> memoryview:
        """What has been written, where it lies."""
        at = self._base + position % self.size
        return memoryview(self.map)[at : at + count]

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
        self._position = self._taken = 0
        """Bytes written, and those that all readers had taken when that last mattered."""

    def send(self, message: bytes) -> None:
        """Send a message to all readers. Raises `OSError` if one is gone."""
        data, most = memoryview(message), self._ring.size // 2
        for at in range(0, len(data), most):
            part = data[at : at + most]
            if (left := self._ring.size - self._position % self._ring.size) < len(part):
                self._position += left  # so that readers find it in one piece
            self._await_room(len(part))
            self._ring.write(self._position, part)
            bell = _BELL.pack(self._position, len(part), at + most < len(data))
            for socket_ in self._bells:
                socket_.sendall(bell)
            self._position += len(part)

    def _await_room(self, size: int) -> None:
        ring, least = self._ring, self._position + size - self._ring.size
        while self._taken < least:
            self._taken = min(map(ring.taken, range(ring.readers)))
            if self._taken < least:
                self._wait()
                time.sleep(_FULL_POLL_S)


def messages(ring: Ring, reader: int, bell: socket.socket, decode: Callable[[memoryview | bytes], T]) -> Iterator[T]:
    """What the writer sends to one reader, until the writer closes its socket. A message that has come in one part is decoded
    where it lies: `decode` must copy what it keeps."""
    parts = list[bytes]()
    while rung := bell.recv(_BELL.size, socket.MSG_WAITALL):
        position, size, more = _BELL.unpack(rung)
        part = ring.view(position, size)
        if more:
            parts.append(bytes(part))
            ring.take(reader, position + size)
            continue
        message = decode(b"".join([*parts, part]) if parts else part)
        ring.take(reader, position + size)
        parts.clear()
        yield message
