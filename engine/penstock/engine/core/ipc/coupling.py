"""What ties the cores of a replica together whose ranks divide experts: memory and bells, which their processes inherit."""

from collections.abc import Sequence

from penstock.engine.config import ParallelConfig
from penstock.engine.core.wave import Waves
from penstock.engine.parallel.expert_group import CoreExperts
from penstock.engine.parallel.shared_memory import SharedMemory


class Coupling:
    """Made by whoever starts the cores; see `Wave` and `ExpertExchange`.

    Args:
        parallel: Of the replica; ConfigError where there is no memory for its ranks to share.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        self._each = parallel.tensor_parallel_size
        stages, world = range(parallel.pipeline_parallel_size), parallel.expert_ranks
        self.memories = [SharedMemory.create(world) for _ in stages]
        self.moves = [SharedMemory.create(world) for _ in stages if parallel.eplb is not None]
        self.waves = Waves(parallel.data_parallel_size)
        self._closed = False

    def experts(self, core: int) -> CoreExperts:
        """What a core inherits of the memory."""
        exchange, moves = (tuple(memory.fd for memory in each) for each in (self.memories, self.moves))
        return CoreExperts(exchange, core, moves)

    @property
    def descriptors(self) -> Sequence[int]:
        """To be passed on to each core."""
        return (*self.experts(0).descriptors, *self.waves.descriptors)

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
