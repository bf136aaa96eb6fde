"""The memory that the ranks of a group on one machine share. Light to import: whoever starts them has no torch.

It has no name and lies in no folder: processes inherit it by a file descriptor, and it is gone when the last of them is. The
limit of /dev/shm does not apply to it.
"""

import mmap
import os
import struct
from typing import Final, NamedTuple

from penstock.engine.config import ConfigError

SLOT_BYTES: Final = 1 << 18
"""Bytes of a message that travel at once: two such buffers of each rank fit into a core's cache."""
_LINE: Final = 64
_PAGE: Final = 4096
_MARK: Final = struct.Struct("=IIQQ")


class RankProgress(NamedTuple):
    """How far a rank has come."""

    pieces: int
    """Pieces of messages that it has published; 32 bits, which wrap."""
    calls: int
    """Collectives that it has begun."""
    seconds: float
    """That they have taken, the wait for other ranks included."""


class SharedMemory:
    """Mapped, and filled as `collective.cpp` has it.

    Args:
        fd: Its file descriptor; closed with it.
        world: Ranks.
        slot_bytes: Of a message that travel at once.
    """

    def __init__(self, fd: int, world: int, slot_bytes: int = SLOT_BYTES) -> None:
        self.fd, self.world, self.slot_bytes = fd, world, slot_bytes
        self.map = mmap.mmap(fd, group_bytes(world, slot_bytes))

    @classmethod
    def create(cls, world: int, slot_bytes: int = SLOT_BYTES) -> "SharedMemory":
        """Create the memory. Raises ConfigError if there is too little."""
        size = group_bytes(world, slot_bytes)
        fd = os.memfd_create("penstock-ranks")
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"{world} ranks need {size:,} bytes of shared memory: {error.strerror}") from error
        return cls(fd, world, slot_bytes)

    @property
    def data_offset(self) -> int:
        """Offset of the slots."""
        return _data_offset(self.world)

    def progress(self) -> list[RankProgress]:
        """Return the progress by rank. May be read while they work."""
        marks = (_MARK.unpack_from(self.map, _LINE * (1 + rank)) for rank in range(self.world))
        return [RankProgress(pieces, calls, 1e-9 * ns) for pieces, _, calls, ns in marks]

    def tick(self, rank: int) -> None:
        """A rank that exchanges nothing says that it has come further."""
        at = _LINE * (1 + rank)
        pieces, unused, calls, ns = _MARK.unpack_from(self.map, at)
        _MARK.pack_into(self.map, at, pieces, unused, calls + 1, ns)

    def fail(self, rank: int) -> None:
        """Tells the ranks that one of them has failed; those that wait for it look within milliseconds."""
        struct.pack_into("=I", self.map, 0, rank + 1)

    def close(self) -> None:
        """Lets go of it; safe to call twice."""
        if not self.map.closed:
            self.map.close()
            os.close(self.fd)


def group_bytes(world: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return the bytes that that many ranks share."""
    return _data_offset(world) + 2 * world * slot_bytes


def _data_offset(world: int) -> int:
    return -(-_LINE * (1 + 3 * world) // _PAGE) * _PAGE
