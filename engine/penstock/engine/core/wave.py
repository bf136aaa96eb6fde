"""How cores that have some of the experts each make their steps together.

Each core counts the steps that it has begun, in memory that all of them share. A core with work begins a step and rings at the
others. A core without work joins each step that another one has begun: its experts are needed, even where it has no tokens. So a
core waits for others only within a step, and none begins one that nobody needs. A core on another node gets a byte for each step.
"""

import mmap
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

_LINE: Final = 64
_COUNT: Final = struct.Struct("=Q")
_ONE: Final = (1).to_bytes(8, "little")
_MOST: Final = 1 << 12


class WaveEnd(msgspec.Struct, frozen=True):
    """What a core inherits, as file descriptors."""

    memory: int
    bells: list[int]
    """By core: an eventfd that wakes it."""
    far: list[tuple[int, int]] = []
    """Cores on other nodes, and the connection to each."""


class Wave:
    """One core's.

    Args:
        end: What it has inherited.
        core: Its number.
    """

    def __init__(self, end: WaveEnd, core: int) -> None:
        self._map = mmap.mmap(end.memory, _LINE * len(end.bells))
        self._far = [_FarCore(fd) for _, fd in end.far]
        elsewhere = {core, *(number for number, _ in end.far)}
        self._core, self._others = core, [number for number in range(len(end.bells)) if number not in elsewhere]
        self._bells = end.bells
        self.num_joined = 0
        """Steps of others that this core has joined without tokens."""

    @property
    def bells(self) -> Sequence[int]:
        """One of them is readable where another core has begun a step."""
        return [self._bells[self._core], *(far.connection.fileno() for far in self._far)]

    @property
    def is_behind(self) -> bool:
        """Whether another core has begun a step that this one has not."""
        own = self._begun(self._core)
        return any(self._begun(other) > own for other in self._others) or any(far.begun() > own for far in self._far)

    def begin(self) -> None:
        """Begins a step, and has the others join."""
        self._count()
        for other in self._others:
            os.write(self._bells[other], _ONE)

    def join(self) -> None:
        """Begins the step that another core has begun."""
        self._count()
        self.num_joined += 1

    def silence(self) -> None:
        """Stops the bells."""
        for far in self._far:
            far.begun()
        with suppress(BlockingIOError):
            os.read(self._bells[self._core], 8)

    def _begun(self, core: int) -> int:
        return _COUNT.unpack_from(self._map, _LINE * core)[0]

    def _count(self) -> None:
        _COUNT.pack_into(self._map, _LINE * self._core, self._begun(self._core) + 1)
        for far in self._far:
            far.tell()


class _FarCore:
    """The steps of a core on another node.

    Args:
        fd: The connection to it.
    """

    def __init__(self, fd: int) -> None:
        self.connection = socket.socket(fileno=fd)
        self._begun = 0

    def begun(self) -> int:
        """How many it has begun, as far as it has been heard here."""
        with suppress(OSError):  # nothing yet, or gone: whoever waits for a core that is gone is told so in the step
            self._begun += len(self.connection.recv(_MOST, socket.MSG_DONTWAIT))
        return self._begun

    def tell(self) -> None:
        """This core has begun a step."""
        with suppress(OSError):
            self.connection.send(b"\1")


class Waves:
    """The memory and the bells, as whoever starts the cores makes them.

    Args:
        cores: How many.
    """

    def __init__(self, cores: int) -> None:
        self._memory = os.memfd_create("penstock-wave")
        os.ftruncate(self._memory, _LINE * cores)
        self._bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(cores)]

    def end(self, far: Sequence[tuple[int, int]] = ()) -> WaveEnd:
        """What a core inherits, with its connections to others."""
        return WaveEnd(self._memory, self._bells, list(far))

    @property
    def descriptors(self) -> Sequence[int]:
        """What every core inherits, to be passed on."""
        return (self._memory, *self._bells)

    def close(self) -> None:
        """Lets go of them; safe to call twice."""
        for descriptor in self.descriptors if self._bells else ():
            os.close(descriptor)
        self._bells = []
