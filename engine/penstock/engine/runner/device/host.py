"""The host as a device: its memory is the host's own."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class _Over:
    def wait(self) -> None:
        """At once."""


class HostRuntime:
    """See `StepRuntime`."""

    device = torch.device("cpu")
    shares_memory = True

    def pinned(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """See Copies."""
        return torch.empty(shape, dtype=dtype)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See Copies."""
        target.copy_(source)

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Over:
        """See Copies."""
        for source, target in pairs:
            target.copy_(source)
        return _Over()

    def main_stream(self) -> AbstractContextManager[None]:
        """See StepRuntime."""
        return nullcontext()

    def failure(self, error: Exception) -> None:
        """See StepRuntime: a CPU that fails tells nobody."""
