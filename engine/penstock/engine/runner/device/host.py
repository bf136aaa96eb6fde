"""The host as a device: its memory is the host's own."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class _Over:
    def wait(self) -> None:
        """At once."""


class HostRuntime:
    """The runtime of a CPU: memory is shared, and nothing runs beside the host."""

    device = torch.device("cpu")
    shares_memory = True

    def pinned(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Memory of the host that the device reads and writes by itself; undefined content."""
        return torch.empty(shape, dtype=dtype)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies pinned memory to the device on the main stream."""
        target.copy_(source)

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Over:
        """Begins to copy from the device, each (source, pinned target), beside the main stream and after what it has been given
        so far."""
        for source, target in pairs:
            target.copy_(source)
        return _Over()

    def main_stream(self) -> AbstractContextManager[None]:
        """What is launched within runs on the main stream."""
        return nullcontext()

    def failure(self, error: Exception) -> None:
        """See StepRuntime: a CPU that fails tells nobody."""
