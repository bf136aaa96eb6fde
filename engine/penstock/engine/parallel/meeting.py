"""Where the nodes of an engine meet, and what each of them brings: ranks of one core, or cores. Light to import."""

from typing import NamedTuple

from penstock.engine.config import ParallelConfig


class Meeting(NamedTuple):
    """A node brings numbers: its own, or those of the data-parallel ranks that it has."""

    host: str
    """Of the node where they meet."""
    port: int
    own: range
    """What the node brings that reads this."""
    first: int
    """Node 0 itself has the numbers below."""
    size: int
    """Of all numbers."""
    name: str
    """What a number is, for messages."""
    host_flag: str
    port_flag: str
    size_flag: str
    taken: str
    """What is taken where two nodes bring the same number."""

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "Meeting":
        """Return that of an engine on several nodes."""
        if parallel.nnodes > 1:
            node = parallel.node_rank
            place, numbers = (parallel.master_addr or "", parallel.master_port), (range(node, node + 1), 1, parallel.nnodes)
            return cls(*place, *numbers, "node", "--master-addr", "--master-port", "--nnodes", "--node-rank")
        place, own = (parallel.data_parallel_address or "", parallel.data_parallel_rpc_port), parallel.local_cores
        flags = "--data-parallel-address", "--data-parallel-rpc-port", "--data-parallel-size"
        # Only node 0 knows how many it has, and it alone asks.
        numbers = (own, len(own), parallel.data_parallel_size)
        return cls(*place, *numbers, "data-parallel rank", *flags, "data-parallel rank")

    def missing(self, brought: list[range]) -> list[int]:
        """The numbers that no other node has brought so far."""
        return [number for number in range(self.first, self.size) if not any(number in numbers for numbers in brought)]
