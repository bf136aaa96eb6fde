"""Memory for pages that several processes map. Light to import: whoever makes it for the ranks has no torch."""

import fcntl
import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux's F_SEAL_FUTURE_WRITE, which Python does not name: mappings that are there can be written, later ones cannot."""


def page_memory() -> int:
    """Return the file descriptor of memory for pages, which has no size yet."""
    return os.memfd_create("penstock-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class SharedSlots:
    """Slots that other processes can read by a file descriptor, and not write. It has no name: the last to close it frees it.

    Args:
        num_slots: Pages.
        page_bytes: Of a page.
        fd: Of the memory, which has no size yet, or this one; None: it is made here. Closed with it.
        writes: Whether this process is the one that writes.
    """

    def __init__(self, num_slots: int, page_bytes: int, fd: int | None = None, *, writes: bool = True) -> None:
        self.fd = page_memory() if fd is None else fd
        try:
            os.ftruncate(self.fd, num_slots * page_bytes)
            self._map = mmap.mmap(self.fd, num_slots * page_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0))
            if writes:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
        except OSError:
            os.close(self.fd)
            raise
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8).reshape(num_slots, page_bytes)
        """[slots, bytes of a page]."""

    def __del__(self) -> None:
        os.close(self.fd)
