"""What ties the cores of a replica together whose ranks divide experts: memory, bells and connections to other nodes. Their
processes inherit it."""

import socket
from collections.abc import Mapping, Sequence

from penstock.engine.config import ParallelConfig
from penstock.engine.core.wave import WaveEnd, Waves
from penstock.engine.parallel.expert_group import CoreExperts, ExpertWires
from penstock.engine.parallel.layout import Wire, WireKind
from penstock.engine.parallel.shared_memory import SharedMemory


class Coupling:
    """Made by whoever starts the cores; see `Wave` and `ExpertExchange`.

    Args:
        parallel: Of the replica; ConfigError where there is no memory for its ranks to share.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        self._wires: Mapping[Wire, socket.socket] = {}
        self._each = parallel.tensor_parallel_size
        stages, world = range(parallel.pipeline_parallel_size), parallel.expert_ranks
        self.memories = [SharedMemory.create(world) for _ in stages]
        self.moves = [SharedMemory.create(world) for _ in stages if parallel.eplb is not None]
        self.waves = Waves(parallel.data_parallel_size)
        self._closed = False

    def connect(self, wires: Mapping[Wire, socket.socket]) -> None:
        """The other nodes have come: these connections lead to their cores and ranks. They are closed with the rest."""
        self._wires = wires

    def wave(self, core: int) -> WaveEnd:
        """How a core joins the steps of the others."""
        first, found = core * self._each, list[tuple[int, int]]()
        for (one, other, kind), stream in self._wires.items():
            if kind == "steps" and first in (one, other):
                found.append(((one + other - first) // self._each, stream.fileno()))
        return self.waves.end(found)

    def experts(self, core: int) -> CoreExperts:
        """What a core inherits for its ranks."""
        exchange, moves = (tuple(memory.fd for memory in each) for each in (self.memories, self.moves))
        return CoreExperts(exchange, core, moves, self._of_ranks(core, "experts"), self._of_ranks(core, "moves"))

    def _of_ranks(self, core: int, kind: WireKind) -> ExpertWires:
        ranks = range(core * self._each, (core + 1) * self._each)
        wires = [(wire, stream.fileno()) for wire, stream in self._wires.items() if wire.kind == kind]
        outgoing = tuple((wire.sender, fd, wire.receiver) for wire, fd in wires if wire.sender in ranks)
        incoming = tuple((wire.receiver, fd) for wire, fd in wires if wire.receiver in ranks)
        return ExpertWires(outgoing, incoming)

    def descriptors(self, core: int) -> Sequence[int]:
        """To be passed on to a core."""
        far = (fd for _, fd in self.wave(core).far)
        return (*self.experts(core).descriptors, *self.waves.descriptors, *far)

    def core_ended(self, core: int) -> None:
        """Has the others know, within milliseconds, that no step of all will come to its end any more."""
        if not self._closed:
            for memory in self._shared:
                memory.fail(core * self._each)

    @property
    def _shared(self) -> list[SharedMemory]:
        return [*self.memories, *self.moves]

    def close(self) -> None:
        """Lets go of it; safe to call twice."""
        if not self._closed:
            self._closed = True
            for memory in self._shared:
                memory.close()
            self.waves.close()
            for stream in self._wires.values():
                stream.close()
