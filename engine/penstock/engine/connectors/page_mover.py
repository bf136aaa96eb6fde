"""What moves pages beside the steps, on one rank: threads, and the end of each move. Files and objects have it in common.

Moves of one page go to the same thread, and so keep their order.
"""

import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.engine.connectors.moves import Move, Moved, PageFile

_HEADER = struct.Struct("<8sQIII")  # mark, bytes of the page, their CRC-32, group, bytes of the name that follows
_MARK: Final = b"penstkv1"


def page_header(move: Move, page: memoryview) -> bytes:
    """Return what stands before a page's bytes: its size, its CRC-32, its group and its name."""
    fixed = _HEADER.pack(_MARK, len(page), zlib.crc32(page), move.group, len(move.block_hash))
    return fixed + move.block_hash


class PageMover:
    """Runs moves.

    Args:
        slots: [slots, bytes of a page] of the host's memory.
        actions: What each kind of move does; it raises where that fails. What it returns are pages that were found.
        threads: Their number.
        name: Of the threads.
    """

    def __init__(
        self,
        slots: npt.NDArray[np.uint8],
        actions: Mapping[str, Callable[[Move], list[PageFile] | None]],
        threads: int,
        name: str,
    ) -> None:
        self.slots = slots
        self._actions = actions
        self._lock = threading.Lock()
        self._moved: dict[int, Moved] = {}
        self._threads = [ThreadPoolExecutor(1, f"{name}-{number}") for number in range(threads)]

    def begin(self, moves: Sequence[Move]) -> None:
        """Begins moves, in this order for each page."""
        for move in moves:
            last = move.block_hash[-1] if move.block_hash else 0
            self._threads[last % len(self._threads)].submit(self._run, move)

    def take(self) -> dict[int, Moved]:
        """Moves that have ended since the last call, by number."""
        with self._lock:
            moved, self._moved = self._moved, {}
        return moved

    def close(self) -> None:
        """Waits until all moves have ended."""
        for thread in self._threads:
            thread.shutdown()

    def _run(self, move: Move) -> None:
        begin, error, found = time.perf_counter(), None, None
        try:
            found = self._actions[move.action](move)
        except Exception as problem:  # noqa: BLE001 whatever it was, somebody waits for the end of the move
            error = f"{type(problem).__name__}: {problem}"
        with self._lock:
            self._moved[move.number] = Moved(time.perf_counter() - begin, error, found or [])
