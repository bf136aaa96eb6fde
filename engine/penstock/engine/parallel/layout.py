"""Which rank is where: the numbers alone. Light to import."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

from penstock.engine.config import ConfigError, ParallelConfig

WireKind = Literal["sums", "core", "steps", "experts", "moves"]


class Wire(NamedTuple):
    """A connection between ranks on different nodes. In one pipeline stage the receiver takes in, for all ranks of its node, what
    the sender adds to sums; between two stages it takes in the sender's hidden states.

    `core` is the way of a frontend to a core on another node. By `steps` two cores tell each other of those that they begin. By
    `experts` and `moves` the receiver takes in what the sender gives to exchanges of all cores."""

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
    """The cores of a replica: consecutive ones are on a node. The frontend is on the node of the first. In wires a core is known
    by its first rank: those of core 1 follow those of core 0."""

    starts: Sequence[int]
    """The first core of each node."""
    cores: int
    tensor: int
    """Ranks of a core."""
    kinds: Sequence[WireKind]
    """What ranks of different cores exchange."""

    @classmethod
    def of(cls, config: ParallelConfig, starts: Sequence[int]) -> "CoreLayout":
        """Return the layout of cores of which the nodes have brought the first ones."""
        kinds: list[WireKind] = ["experts"] if config.is_in_step else []
        if config.is_in_step and config.eplb is not None:
            kinds.append("moves")
        return cls(starts, config.data_parallel_size, config.tensor_parallel_size, kinds)

    def node(self, rank: int) -> int:
        """Where a rank runs."""
        return bisect_right(self.starts, rank // self.tensor) - 1

    def wires(self) -> list[Wire]:
        """All connections between nodes."""
        ranks = range(self.cores * self.tensor)
        firsts = ranks[:: self.tensor]
        found = [Wire(0, core, "core") for core in firsts if self.node(core)]
        if self.kinds:
            found += [Wire(one, other, "steps") for one in firsts for other in firsts if self.node(one) < self.node(other)]
        for kind in self.kinds:
            for sender in ranks:
                found += [
                    Wire(sender, start * self.tensor, kind) for at, start in enumerate(self.starts) if at != self.node(sender)
                ]
        return found
