"""One rank's place among those that divide the experts of a mixture. Light to import."""

from typing import NamedTuple

from penstock.engine.config import EplbConfig, ParallelConfig
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.kernels.cpu.isa import IsaName


class ExpertWires(NamedTuple):
    """Connections to ranks on other nodes, as file descriptors."""

    outgoing: tuple[tuple[int, int, int], ...] = ()
    """A rank that sends, the connection, and the rank that takes in there."""
    incoming: tuple[tuple[int, int], ...] = ()
    """A rank that takes in for all ranks of its node, and the connection."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """To be passed on."""
        return (*(fd for _, fd, _ in self.outgoing), *(fd for _, fd in self.incoming))

    def sent_by(self, rank: int) -> list[tuple[int, int]]:
        """Where a rank sends: the connection, and the rank there."""
        return [(fd, other) for sender, fd, other in self.outgoing if sender == rank]

    def taken_by(self, rank: int) -> list[int]:
        """What a rank takes in."""
        return [fd for receiver, fd in self.incoming if receiver == rank]


class ExpertGroup(NamedTuple):
    """Of a rank that has some of each layer's experts, and all of them whole."""

    rank: int
    """Among all ranks of all cores; those of one core follow one another."""
    each: int
    """Ranks of a core, which have the same tokens."""
    memory: SharedMemory
    """All ranks'."""
    timeout: float
    """Seconds that a rank may keep others waiting."""
    isa: IsaName | None = None
    """The CPU's instruction set; None: the best that it has."""
    moves: SharedMemory | None = None
    """All ranks', for weights that move beside steps; None: experts stay where they are."""
    eplb: EplbConfig | None = None
    """When they move."""
    wires: ExpertWires = ExpertWires()
    """To ranks on other nodes. So is the next, for weights that move."""
    move_wires: ExpertWires = ExpertWires()

    @property
    def world(self) -> int:
        """Ranks."""
        return self.memory.world

    @property
    def cores(self) -> int:
        """Cores, each with tokens of its own."""
        return self.world // self.each

    @property
    def core(self) -> int:
        """The rank's."""
        return self.rank // self.each


class CoreExperts(NamedTuple):
    """What a core knows of the ranks that divide experts."""

    memories: tuple[int, ...]
    """File descriptors of what all of them share, one for each pipeline stage."""
    core: int
    """Its number."""
    moves: tuple[int, ...] = ()
    """The same of what they share to move experts; empty: experts stay where they are."""
    wires: ExpertWires = ExpertWires()
    """Of the core's ranks. So is the next."""
    move_wires: ExpertWires = ExpertWires()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """To be passed on to each rank."""
        return (*self.memories, *self.moves, *self.wires.descriptors, *self.move_wires.descriptors)


def expert_group(
    experts: CoreExperts, rank: int, parallel: ParallelConfig, timeout: float, isa: IsaName | None, stage: int = 0
) -> ExpertGroup:
    """The place of a rank that divides the layers of a pipeline stage with others of its core, where it is the `rank`-th."""
    each, world = parallel.tensor_parallel_size, parallel.expert_ranks
    moves = SharedMemory(experts.moves[stage], world) if experts.moves else None
    memory = SharedMemory(experts.memories[stage], world)
    wires = experts.wires, experts.move_wires
    return ExpertGroup(experts.core * each + rank, each, memory, timeout, isa, moves, parallel.eplb, *wires)
