"""What ties the cores of a replica together whose ranks divide experts: memory and bells, which their processes inherit."""

from collections.abc import Sequence

from penstock.engine.config import ParallelConfig
from penstock.engine.core.wave import Waves
from penstock.engine.parallel.shared_memory import SharedMemory


class Coupling:
    """Made by whoever starts the cores; see `Wave` and `ExpertExchange`.

    Args:
        parallel: Of the replica; ConfigError where there is no memory for its ranks to share.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        self._each = parallel.tensor_parallel_size
        self.memory = SharedMemory.create(parallel.expert_ranks)
        self.waves = Waves(parallel.data_parallel_size)
        self._closed = False

    @property
    def descriptors(self) -> Sequence[int]:
        """To be passed on to each core."""
        return (self.memory.fd, *self.waves.descriptors)

    def core_ended(self, core: int) -> None:
        """Has the others know, within milliseconds, that no step of all will come to its end any more."""
        if not self._closed:
            self.memory.fail(core * self._each)

    def close(self) -> None:
        """Lets go of it; safe to call twice."""
        if not self._closed:
            self._closed = True
            self.memory.close()
            self.waves.close()
