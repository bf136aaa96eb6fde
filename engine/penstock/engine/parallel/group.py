"""One rank's place among the others, and how it reaches them. Light to import."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.engine.config import ConfigError
from penstock.engine.models.layers.shard import Stage
from penstock.engine.parallel.links import LinkEnd
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.engine.parallel.words import FarLink
from penstock.kernels.cpu.build import BuildError
from penstock.kernels.cpu.isa import IsaName

if TYPE_CHECKING:
    from penstock.engine.models.layers.comm import Comm
    from penstock.kernels.ops import Ops

log = logging.getLogger(__name__)


class Wires(NamedTuple):
    """A rank's connections to ranks on other nodes, as `WorkerStart` has them."""

    outgoing: Sequence[tuple[int, int]] = ()
    incoming: Sequence[int] = ()
    before: FarLink | None = None
    after: FarLink | None = None


class Group(NamedTuple):
    """Of a rank that is not alone."""

    rank: int
    """Among the ranks that divide the same layers."""
    world: int
    """How many these are."""
    memory: SharedMemory
    """Theirs."""
    meeting: str
    """A URL for gloo, where shared memory cannot be used."""
    timeout: float
    """Seconds that a rank may keep others waiting."""
    isa: IsaName | None = None
    """The CPU's instruction set; None: the best that it has."""
    stage: Stage = Stage()
    """Which layers these ranks divide."""
    before: LinkEnd | None = None
    """From the pipeline stage before; None: there is none."""
    after: LinkEnd | None = None
    """To the next one."""
    wires: Wires = Wires()
    """To other nodes."""
    neighbours: int | None = None
    """Ranks of all stages on this node, itself included; None: all ranks."""
    page_memory: Sequence[int] = ()
    """By rank of this node, file descriptors of memory that all of them can map for pages; empty: no ranks share pages."""

    @property
    def number(self) -> int:
        """The rank's among those of all stages."""
        return self.stage.rank * self.world + self.rank

    @property
    def ranks(self) -> int:
        """Ranks of all stages that share this machine."""
        return self.neighbours or self.stage.world * self.world

    def connect(self, ops: "Ops") -> "Comm":
        """The rank's connection to the others, by the compiled operations if there are any."""
        from penstock.engine.parallel.shared_comm import SharedComm
        from penstock.kernels.ops import native_collectives

        try:
            # Those of the operations are taken down by their tapes.
            collectives = ops.collectives or native_collectives(self.isa)
        except BuildError as error:
            if self.wires.outgoing:
                raise ConfigError(f"ranks on several nodes exchange by compiled operations alone: {error}") from error
            from penstock.engine.parallel.gloo_comm import GlooComm

            log.warning("ranks exchange over gloo, many times slower than through shared memory (%s)", error)
            return GlooComm(self.meeting, self.rank, self.world, self.timeout)
        return SharedComm(self.memory, self.rank, collectives, self.timeout, self.wires.outgoing, self.wires.incoming)
