"""How ranks add up and join what each has computed where they share no memory, or have no compiled operations: over TCP."""

from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.engine.parallel.errors import GroupFailed
from penstock.kernels.collective.reference import add_in_order


class GlooComm:
    """See Comm. Gloo's own sum depends on the size of a message from three ranks on; so partial sums are gathered, and each rank
    adds them in the order of ranks. A process has one such group.

    Args:
        meeting: Where ranks find each other: `tcp://host:port`, or `file:///path` on one machine.
        rank: This process's.
        world: Ranks of the group.
        timeout: Seconds that a rank may keep others waiting.
    """

    def __init__(self, meeting: str, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world = rank, world
        limit = timedelta(seconds=timeout)
        try:
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=limit)
        except RuntimeError as error:
            raise GroupFailed(f"rank {rank} has not found the other {world - 1} at {meeting}: {error}") from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, added in the order of ranks, on all ranks."""
        return add_in_order(self._gathered(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, k] of each rank → [n, ranks · k], in the order of ranks, on all ranks."""
        return torch.cat(self._gathered(x), -1)

    def agree(self, value: float) -> float:
        """Rank 0's value, on all ranks: what they measure themselves is not the same."""
        return self._gathered(torch.tensor([value], dtype=torch.float64))[0].item()

    def check(self) -> None:
        """Every call has raised by itself."""

    def close(self) -> None:
        """Leaves the group; no call may follow."""
        dist.destroy_process_group()

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world)]
        try:
            # Bytes: gloo lacks some dtypes.
            flat = [part.view(-1).view(torch.uint8) for part in parts]
            dist.all_gather(flat, x.view(-1).view(torch.uint8))
        except RuntimeError as error:
            raise GroupFailed(f"rank {self.rank} could not exchange with the others: {error}") from error
        return parts
