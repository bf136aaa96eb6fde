"""What a runner asks of its device beside tensor operations: streams, copies that the host does not wait for, memory figures.

Two streams: steps run on the main one, in order; results leave on a second one, so that the next step does not wait for them.
Everything that is CUDA's own is in `CudaRuntime`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch

from penstock.engine.config import ConfigError
from penstock.engine.devices import MIN_CAPABILITY


class DeviceFailed(RuntimeError):
    """The device, or what is left of it, cannot be used any more: no step may follow."""


class Transfer(Protocol):
    """Copies under way to the host."""

    def wait(self) -> None:
        """Until the host's side may be read. The one wait of a step."""
        ...


class DeviceMemory(NamedTuple):
    """Bytes."""

    total: int
    free: int
    """What nobody on the device has: other processes counted, and what torch keeps for itself as well."""
    allocated: int
    """Of this process's tensors."""
    reserved: int
    """What torch holds of the device for tensors that are there or may come."""
    peak: int
    """The most that `allocated` has been since `reset_peak`."""


class Copies(Protocol):
    """How numbers get to a device and back."""

    device: torch.device
    shares_memory: bool
    """Whether the device's memory is the host's, so that nothing need be copied."""

    def pinned(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Memory of the host that the device reads and writes by itself; undefined content."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies pinned memory to the device on the main stream. The source must stay as it is until a `Transfer` begun later is
        over."""
        ...

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """Begins to copy from the device, each (source, pinned target), beside the main stream and after what it has been given
        so far. The sources must stay as they are until it is over."""
        ...


class StepRuntime(Copies, Protocol):
    """What a step asks of its device; a CPU is one, too."""

    def main_stream(self) -> AbstractContextManager[None]:
        """What is launched within runs on the main stream."""
        ...

    def failure(self, error: Exception) -> DeviceFailed | None:
        """What an error says about the device; None: the device is well."""
        ...


class DeviceRuntime(StepRuntime, Protocol):
    """One device whose memory is not the host's."""

    def synchronize(self) -> None:
        """Waits for everything: never in a step."""
        ...

    def memory(self) -> DeviceMemory:
        """As it is now."""
        ...

    def reset_peak(self) -> None:
        """Begins to measure the peak anew."""
        ...

    def return_free_memory(self) -> None:
        """Hands what torch keeps of freed memory back to the device."""
        ...


class _CudaTransfer:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class CudaRuntime:
    """The first visible NVIDIA GPU.

    Raises:
        ConfigError: There is none that serves.
    """

    shares_memory = False

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise ConfigError(f"--device cuda: torch {torch.__version__} was built without CUDA; --device cpu is what it can")
        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no CUDA device (driver, CUDA_VISIBLE_DEVICES?)")
        self.device = torch.device("cuda", 0)
        capability = torch.cuda.get_device_capability(self.device)
        if capability < MIN_CAPABILITY:
            name, least = torch.cuda.get_device_name(self.device), ".".join(map(str, MIN_CAPABILITY))
            raise ConfigError(f"--device cuda: {name} has compute capability {capability[0]}.{capability[1]}, below {least}")
        torch.cuda.set_device(self.device)
        self._main, self._side = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        # Whatever this thread allocates and fills is there for the steps: one stream has one order.
        torch.cuda.set_stream(self._main)

    def pinned(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return a tensor in pinned memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    @contextmanager
    def main_stream(self) -> Iterator[None]:
        """Enter the main stream."""
        with torch.cuda.stream(self._main):
            yield

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pinned memory to the device on the main stream."""
        with torch.cuda.stream(self._main):
            target.copy_(source, non_blocking=True)

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _CudaTransfer:
        """Copy tensors to the host on the side stream, after the work on the main stream so far."""
        self._side.wait_stream(self._main)
        event = torch.cuda.Event(blocking=False)
        with torch.cuda.stream(self._side):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                # Its memory must not be given to anybody before the copy, wherever it was allocated.
                source.record_stream(self._side)
            event.record(self._side)
        return _CudaTransfer(event)

    def synchronize(self) -> None:
        """Waits for everything: never in a step."""
        torch.cuda.synchronize(self.device)

    def memory(self) -> DeviceMemory:
        """As it is now."""
        free, total = torch.cuda.mem_get_info(self.device)
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        return DeviceMemory(total, free, allocated, reserved, torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        """Begins to measure the peak anew."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def return_free_memory(self) -> None:
        """Hands what torch keeps of freed memory back to the device."""
        torch.cuda.empty_cache()

    def failure(self, error: Exception) -> DeviceFailed | None:
        """See DeviceRuntime. After an error of CUDA's every further call fails; after lack of memory so would the next step."""
        if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError) or "CUDA" in str(error):
            return DeviceFailed(f"the CUDA device failed: {type(error).__name__}: {error}")
        return None
