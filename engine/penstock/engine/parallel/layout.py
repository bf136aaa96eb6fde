"""Which rank is where: the numbers alone. Light to import."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

from penstock.engine.config import ConfigError, ParallelConfig

WireKind = Literal["sums", "core"]


class Wire(NamedTuple):
    """A connection between ranks on different nodes. In one pipeline stage the receiver takes in, for all ranks of its node, what
    the sender adds to sums; between two stages it takes in the sender's hidden states. `core` is the way of a frontend to a
    core on another node."""

    sender: int
    receiver: int
    kind: WireKind = "sums"


class Layout(NamedTuple):
    """The ranks of an engine: consecutive ranks are a stage, and consecutive ranks are on a node."""

    tensor: int
    """Ranks of a pipeline stage."""
    stages: int
    nodes: int

    @classmethod
    def of(cls, config: ParallelConfig) -> "Layout":
        """Return the layout that the flags ask for. Raises ConfigError where the ranks cannot be distributed among the nodes."""
        layout = cls(config.tensor_parallel_size, config.pipeline_parallel_size, config.nnodes)
        if layout.world % layout.nodes:
            raise ConfigError(
                f"--nnodes {layout.nodes}: {layout.tensor} tensor parallel x {layout.stages} pipeline parallel = {layout.world} "
                f"ranks cannot be divided among {layout.nodes} nodes"
            )
        return layout

    @property
    def world(self) -> int:
        """Ranks of all stages."""
        return self.tensor * self.stages

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.world // self.nodes

    def node(self, rank: int) -> int:
        """Where a rank runs."""
        return rank // self.per_node

    def stage(self, rank: int) -> int:
        """The pipeline stage that a rank belongs to."""
        return rank // self.tensor

    def on_node(self, node: int) -> range:
        """The ranks that run on a node."""
        return range(node * self.per_node, (node + 1) * self.per_node)

    def of_stage(self, stage: int) -> range:
        """The ranks of a stage."""
        return range(stage * self.tensor, (stage + 1) * self.tensor)

    def wires(self) -> list[Wire]:
        """All connections between ranks on different nodes."""
        found = list[Wire]()
        for sender in range(self.world):
            own, ranks = self.node(sender), self.of_stage(self.stage(sender))
            for node in sorted({self.node(rank) for rank in ranks} - {own}):
                found.append(Wire(sender, next(rank for rank in ranks if self.node(rank) == node)))
            after = sender + self.tensor
            if after < self.world and self.node(after) != own:
                found.append(Wire(sender, after))
        return found


class CoreLayout(NamedTuple):
    """The cores of a replica: consecutive ones are on a node. The frontend is on the node of the first."""

    starts: Sequence[int]
    """The first core of each node."""
    size: int
    """Cores."""

    def node(self, core: int) -> int:
        """Where a core runs."""
        return bisect_right(self.starts, core) - 1

    def wires(self) -> list[Wire]:
        """All connections between nodes: from the frontend to each core that is not on its node."""
        return [Wire(0, core, "core") for core in range(self.size) if self.node(core)]
