"""How fast the storage of a checkpoint is, measured: no load can take less than its bytes over that."""

import contextlib
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

PIECE = 8 << 20
MOST_BYTES = 64 << 20
MOST_S = 1.0
"""A start must not wait longer for a figure."""


def load_floor_s(files: Sequence[Path]) -> float:
    """Seconds that reading the files takes at least, at the bandwidth of the storage: the first part of the largest is read.

    Where the file system allows it, the page cache is passed by (O_DIRECT). Elsewhere a file that was read lately gives the
    bandwidth of memory, and so a floor that is lower than the storage's.

    Raises:
        OSError: A file cannot be read.
    """
    sizes = {file: file.stat().st_size for file in files}
    total = sum(sizes.values())
    if total == 0:
        return 0.0
    largest = max(sizes, key=lambda file: sizes[file])
    read, seconds = _timed(largest)
    return total / read * seconds if read else 0.0


def _timed(file: Path) -> tuple[int, float]:
    """Bytes that were read, and the seconds that it took."""
    descriptor = _opened(file)
    try:
        with mmap.mmap(-1, PIECE) as buffer:  # whose address suits O_DIRECT
            done, began = 0, time.perf_counter()
            while done < MOST_BYTES and time.perf_counter() - began < MOST_S:
                count = os.preadv(descriptor, [buffer], done)
                done += count
                if count < PIECE:
                    break
            return done, time.perf_counter() - began
    finally:
        os.close(descriptor)


def _opened(file: Path) -> int:
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY | direct)
            try:
                with mmap.mmap(-1, mmap.PAGESIZE) as buffer:
                    os.preadv(descriptor, [buffer], 0)
            except OSError:  # it opens, and then cannot
                os.close(descriptor)
            else:
                return descriptor
    return os.open(file, os.O_RDONLY)
