"""The pages themselves, on one rank: copied between the KV cache and the host's memory."""

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.connectors.shared_slots import SharedSlots
from penstock.engine.core.plan import Transfers, ints


class HostPages:
    """Slots of the host's memory. One thread copies, beside the steps' own.

    Args:
        pages: The KV cache: [blocks, …], a page each, in one piece.
        num_slots: Pages that the host's memory holds.
        shared: Whether other processes may read them.
        memory: As in `SharedSlots`, where several ranks have the same pages: one of them stores, and all load.
        stores: Whether this rank stores.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        num_slots: int,
        *,
        shared: bool = False,
        memory: int | None = None,
        stores: bool = True,
    ) -> None:
        self.move_to(pages)
        page_bytes, self._stores = self._pages.shape[1], stores
        self.shared: SharedSlots | None = None
        """None: these slots are this process's own."""
        if shared or memory is not None:
            self.shared = SharedSlots(num_slots, page_bytes, memory, writes=stores)
        self.slots: npt.NDArray[np.uint8] = (
            np.empty((num_slots, page_bytes), np.uint8) if self.shared is None else self.shared.array
        )
        """[slots, bytes of a page]."""
        self._thread = ThreadPoolExecutor(1, "page-copies")
        self._cores = os.sched_getaffinity(0)
        self._core: Callable[[], int] = ctypes.CDLL(None).sched_getcpu

    def move_to(self, pages: torch.Tensor) -> None:
        """Use another cache: the old one was allocated again, or released, and then `pages` is empty."""
        self._pages: npt.NDArray[np.uint8] = pages.flatten(1).numpy() if pages.numel() else np.empty((0, 0), np.uint8)

    def begin(self, transfers: Transfers) -> Future[tuple[float, float]]:
        """Begins to copy, stores before loads. Gives the seconds that each have taken when all is copied."""
        return self._thread.submit(self._copy_beside, self._core(), transfers)

    def _copy_beside(self, core: int, transfers: Transfers) -> tuple[float, float]:
        """Copies on another core than the steps' own.

        A kernel that does not know which cores share a cache would wake this thread on that one: one would wait for the other.
        """
        if len(self._cores) > 1 and self._core() == core:
            with suppress(OSError):  # the process may have lost the others since: then there is nowhere to go
                os.sched_setaffinity(0, self._cores - {core})
        return self._copy(transfers)

    def _copy(self, transfers: Transfers) -> tuple[float, float]:
        begin = time.perf_counter()
        if self._stores:
            for block, slot in zip(ints(transfers.store_blocks), ints(transfers.store_slots), strict=True):
                self.slots[slot] = self._pages[block]
        stored = time.perf_counter()
        for block, slot in zip(ints(transfers.load_blocks), ints(transfers.load_slots), strict=True):
            self._pages[block] = self.slots[slot]
        return stored - begin, time.perf_counter() - stored
