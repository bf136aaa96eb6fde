"""How cores that have some of the experts each make their steps together.

Each core counts the steps that it has begun, in memory that all of them share. A core with work begins a step and rings at the
others. A core without work joins each step that another one has begun: its experts are needed, even where it has no tokens. So a
core waits for others only within a step, and none begins one that nobody needs.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final

import msgspec

_LINE: Final = 64
_COUNT: Final = struct.Struct("=Q")
_ONE: Final = (1).to_bytes(8, "little")


class WaveEnd(msgspec.Struct, frozen=True):
    """What a core inherits, as file descriptors."""

    memory: int
    bells: list[int]
    """By core: an eventfd that wakes it."""


class Wave:
    """One core's.

    Args:
        end: What it has inherited.
        core: Its number.
    """

    def __init__(self, end: WaveEnd, core: int) -> None:
        self._map = mmap.mmap(end.memory, _LINE * len(end.bells))
        self._core, self._others = core, [number for number in range(len(end.bells)) if number != core]
        self._bells = end.bells
        self.num_joined = 0
        """Steps of others that this core has joined without tokens."""

    @property
    def bell(self) -> int:
        """Readable where another core has begun a step."""
        return self._bells[self._core]

    @property
    def is_behind(self) -> bool:
        """Whether another core has begun a step that this one has not."""
        own = self._begun(self._core)
        return any(self._begun(other) > own for other in self._others)

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
        """Stops the bell."""
        try:
            os.read(self.bell, 8)
        except BlockingIOError:
            return

    def _begun(self, core: int) -> int:
        return _COUNT.unpack_from(self._map, _LINE * core)[0]

    def _count(self) -> None:
        _COUNT.pack_into(self._map, _LINE * self._core, self._begun(self._core) + 1)


class Waves:
    """The memory and the bells, as whoever starts the cores makes them.

    Args:
        cores: How many.
    """

    def __init__(self, cores: int) -> None:
        self._memory = os.memfd_create("penstock-wave")
        os.ftruncate(self._memory, _LINE * cores)
        self._bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(cores)]

    @property
    def end(self) -> WaveEnd:
        """What every core inherits."""
        return WaveEnd(self._memory, self._bells)

    @property
    def descriptors(self) -> Sequence[int]:
        """The same, to be passed on."""
        return (self._memory, *self._bells)

    def close(self) -> None:
        """Lets go of them; safe to call twice."""
        for descriptor in self.descriptors if self._bells else ():
            os.close(descriptor)
        self._bells = []
