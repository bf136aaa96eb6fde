"""The pages themselves, on one rank: copied between the KV cache and the host's memory."""

import fcntl
import mmap
import os
import time
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.core.plan import Transfers, ints

_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux's F_SEAL_FUTURE_WRITE, which Python does not name: mappings that are there can be written, later ones cannot."""


class SharedSlots:
    """Slots that other processes can read by a file descriptor, and not write. It has no name: the last to close it frees it.

    Args:
        num_slots: Pages.
        page_bytes: Of a page.
    """

    def __init__(self, num_slots: int, page_bytes: int) -> None:
        self.fd = os.memfd_create("penstock-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_slots * page_bytes)
            self._map = mmap.mmap(self.fd, num_slots * page_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
        except OSError:
            os.close(self.fd)
            raise
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8).reshape(num_slots, page_bytes)
        """[slots, bytes of a page]."""

    def __del__(self) -> None:
        os.close(self.fd)


class HostPages:
    """Slots of the host's memory.

    Args:
        pages: The KV cache: [blocks, …], a page each, in one piece.
        num_slots: Pages that the host's memory holds.
        shared: Whether other processes may read them.
    """

    def __init__(self, pages: torch.Tensor, num_slots: int, *, shared: bool = False) -> None:
        self._pages = pages.flatten(1)
        page_bytes = self._pages.shape[1]
        self.shared = SharedSlots(num_slots, page_bytes) if shared else None
        """None: these slots are this process's own."""
        if self.shared is not None:
            self._slots = torch.from_numpy(self.shared.array)
        else:
            self._slots = torch.empty(num_slots, page_bytes, dtype=torch.uint8, pin_memory=pages.is_cuda)

    @property
    def slots(self) -> npt.NDArray[np.uint8]:
        """[slots, bytes of a page]."""
        return self._slots.numpy()

    def move_to(self, pages: torch.Tensor) -> None:
        """Use another cache: the old one was allocated again, or released, and then `pages` is empty."""
        self._pages = pages.flatten(1) if pages.numel() else pages

    def run(self, transfers: Transfers) -> tuple[float, float]:
        """Copies in the order of the device's stream: stores, then loads. Returns the seconds that the host spent on each."""
        begin = time.perf_counter()
        for block, slot in zip(ints(transfers.store_blocks), ints(transfers.store_slots), strict=True):
            self._slots[slot].copy_(self._pages[block], non_blocking=True)
        stored = time.perf_counter()
        for block, slot in zip(ints(transfers.load_blocks), ints(transfers.load_slots), strict=True):
            self._pages[block].copy_(self._slots[slot], non_blocking=True)
        return stored - begin, time.perf_counter() - stored
