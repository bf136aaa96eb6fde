"""One rank's place among the others, and how it reaches them. Light to import."""

import logging
from typing import TYPE_CHECKING, NamedTuple

from penstock.engine.parallel.shared_memory import SharedMemory

if TYPE_CHECKING:
    from penstock.engine.models.layers.comm import Comm
    from penstock.kernels.ops import Ops

log = logging.getLogger(__name__)


class Group(NamedTuple):
    """Of a rank that is not alone."""

    rank: int
    world: int
    memory: SharedMemory
    meeting: str
    """A URL for gloo, where shared memory cannot be used."""
    timeout: float
    """Seconds that a rank may keep others waiting."""

    def connect(self, ops: "Ops") -> "Comm":
        """The rank's connection to the others, by the compiled operations if there are any."""
        from penstock.engine.parallel.shared_comm import SharedComm

        if ops.collectives is not None:
            return SharedComm(self.memory, self.rank, ops.collectives, self.timeout)
        from penstock.engine.parallel.gloo_comm import GlooComm

        log.warning("ranks exchange over gloo, many times slower than through shared memory: the kernels are %s", ops.form)
        return GlooComm(self.meeting, self.rank, self.world, self.timeout)
