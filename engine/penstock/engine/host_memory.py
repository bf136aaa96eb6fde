"""What the C library does with memory of the host that is not needed any more."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE_BYTES = 1 << 20
KEPT_BYTES = 32 << 20
"""The most that glibc lets its own threshold rise to, as it does when such blocks are freed."""


def return_free_memory() -> None:
    """Hands what the C library keeps of freed memory back to the system; where it is not glibc it keeps none worth the name."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Within it, blocks of a megabyte and more are the system's again as soon as they are freed; for loading, where each layer's
    memory is freed in another form than it is needed next. Afterwards they are kept, as steps want it, which take them again."""
    _set_allocator(LARGE_BYTES, LARGE_BYTES)
    try:
        yield
    finally:
        _set_allocator(KEPT_BYTES, 2 * KEPT_BYTES)


def _set_allocator(apart: int, trim: int) -> None:
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:  # glibc's and musl's; musl's does nothing, and needs nothing
        option(M_MMAP_THRESHOLD, apart)
        option(M_TRIM_THRESHOLD, trim)
