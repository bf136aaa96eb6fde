"""One rank's place among those that divide the experts of a mixture. Light to import."""

from typing import NamedTuple

from penstock.engine.config import EplbConfig, ParallelConfig
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.kernels.cpu.isa import IsaName


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

    @property
    def descriptors(self) -> tuple[int, ...]:
        """To be passed on to each rank."""
        return (*self.memories, *self.moves)


def expert_group(
    experts: CoreExperts, rank: int, parallel: ParallelConfig, timeout: float, isa: IsaName | None, stage: int = 0
) -> ExpertGroup:
    """The place of a rank that divides the layers of a pipeline stage with others of its core, where it is the `rank`-th."""
    each, world = parallel.tensor_parallel_size, parallel.expert_ranks
    moves = SharedMemory(experts.moves[stage], world) if experts.moves else None
    memory = SharedMemory(experts.memories[stage], world)
    return ExpertGroup(experts.core * each + rank, each, memory, timeout, isa, moves, parallel.eplb)
