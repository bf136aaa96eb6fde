"""The host's memory as the runner's device."""

import ctypes


def return_free_memory() -> None:
    """Hands what the C library keeps of freed memory back to the system; where it is not glibc it keeps none worth the name."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
