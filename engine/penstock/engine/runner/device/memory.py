"""What a device's memory goes to while an engine starts: a baseline, then weights, then the largest step."""

import gc
from collections.abc import Callable

from penstock.engine.config import CacheConfig
from penstock.engine.core.memory import Memory, check_at_start
from penstock.engine.runner.device.runtime import DeviceRuntime


class DeviceAccount:
    """Begun before anything is on the device.

    Args:
        runtime: The device.
        cache: What is asked of it.

    Raises:
        ConfigError: It is not free, as others use the device too.
    """

    def __init__(self, runtime: DeviceRuntime, cache: CacheConfig) -> None:
        found = runtime.memory()
        check_at_start(cache, found.total, found.free)
        self._runtime, self._at_start = runtime, found.free

    def peak_of(self, step: Callable[[], None]) -> int:
        """Bytes of tensors that a step takes for a while, beside those that were there before."""
        self._settle()
        before = self._runtime.memory().allocated
        self._runtime.reset_peak()
        step()
        self._runtime.synchronize()
        return self._runtime.memory().peak - before

    def measure(self, graphs: int = 0) -> Memory:
        """After `peak_of`, whose largest step has had libraries take the memory that they keep.

        Args:
            graphs: Bytes that graphs will take which are captured later.

        Returns:
            The device's memory; `own` is everything that has gone since the baseline, torch's or not, so that the process's
            context, which was there before, is not in it. What others have taken since counts as well: it is gone.
        """
        self._settle()
        found = self._runtime.memory()
        own = max(self._at_start - found.free, found.reserved)
        return Memory(total=found.total, free=found.free, own=own, at_start=self._at_start, graphs=graphs)

    def _settle(self) -> None:
        self._runtime.synchronize()
        gc.collect()
        self._runtime.return_free_memory()
