"""A device made of CPU tensors whose copies come late, so that whoever counts on them too early reads something else.

Launches run at once. A download copies only when it is waited for: by then the next steps have run. An upload arrives at once,
and what it came from must stay as it is until a later download is over: that is looked at.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from penstock.engine.runner.device.runtime import DeviceFailed, DeviceMemory

GARBAGE = -858993460


class LateTransfer:
    def __init__(self, runtime: "LateRuntime", pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], uploads: int) -> None:
        self.runtime, self.pairs, self.uploads, self.done = runtime, pairs, uploads, False

    def wait(self) -> None:
        self.runtime.waits += 1
        self.runtime.finish(self)


class LateRuntime:
    """Counts what makes the host wait."""

    shares_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.waits, self.synchronizations, self.uploads, self.downloads = 0, 0, 0, 0
        self._transfers: list[LateTransfer] = []
        self._sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.broken: str | None = None
        """What every error is from now on: the device is lost."""

    def pinned(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        # A step's; what weights pass through is large.
        return torch.full(shape, GARBAGE, dtype=dtype) if dtype == torch.int32 else torch.empty(shape, dtype=dtype)

    def main_stream(self) -> nullcontext[None]:
        return nullcontext()

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.uploads += 1
        target.copy_(source)
        self._sources.append((source, source.clone()))

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> LateTransfer:
        self.downloads += 1
        for source, target in pairs:
            assert source.is_contiguous() and target.is_contiguous(), "such a copy makes the host wait"
            target.view(-1).view(torch.uint8).fill_(0xCC)
        self._transfers.append(LateTransfer(self, pairs, self.uploads))
        return self._transfers[-1]

    def finish(self, last: LateTransfer) -> None:
        """Copies in order, up to one."""
        while self._transfers and not last.done:
            self._finish(self._transfers.pop(0))

    def _finish(self, transfer: LateTransfer) -> None:
        begun = transfer.uploads - (self.uploads - len(self._sources))
        for source, content in self._sources[:begun]:
            assert torch.equal(source, content), "pinned memory was written while it was copied"
        del self._sources[: max(begun, 0)]
        with torch.inference_mode():  # in which some of the memory was made
            for source, target in transfer.pairs:
                target.copy_(source)
        transfer.done = True

    def synchronize(self) -> None:
        self.synchronizations += 1
        while self._transfers:
            self._finish(self._transfers.pop(0))
        self._sources.clear()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1 << 34, (1 << 34) - (1 << 28), 0, 0, 0)

    def reset_peak(self) -> None:
        pass

    def return_free_memory(self) -> None:
        pass

    def failure(self, error: Exception) -> DeviceFailed | None:
        return None if self.broken is None else DeviceFailed(f"{self.broken}: {error}")
