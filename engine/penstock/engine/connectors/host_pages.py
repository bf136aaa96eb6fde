"""The pages themselves, on one rank: copied between the KV cache and the host's memory."""

import time

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.core.plan import Transfers, ints


class HostPages:
    """Slots of the host's memory.

    Args:
        pages: The KV cache: [blocks, …], a page each, in one piece.
        num_slots: Pages that the host's memory holds.
    """

    def __init__(self, pages: torch.Tensor, num_slots: int) -> None:
        self._pages = pages.flatten(1)
        self._slots = torch.empty(num_slots, self._pages.shape[1], dtype=torch.uint8, pin_memory=pages.is_cuda)

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
