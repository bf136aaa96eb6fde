"""What moves pages beside the steps, on one rank: threads, and the end of each move. Files, stores and objects have it in common.

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
        timeout_s: After which a move has failed, though its thread may hang; None: threads end in time of themselves.
    """

    def __init__(
        self,
        slots: npt.NDArray[np.uint8],
        actions: Mapping[str, Callable[[Move], list[PageFile] | None]],
        threads: int,
        name: str,
        timeout_s: float | None = None,
    ) -> None:
        self.slots = slots
        self._actions = actions
        self._lock = threading.Lock()
        self._moved: dict[int, Moved] = {}
        self._timeout_s = timeout_s
        self._under: dict[int, float] = {}
        """When each move that has not ended was begun, in seconds."""
        self._threads = [ThreadPoolExecutor(1, f"{name}-{number}") for number in range(threads)]

    def begin(self, moves: Sequence[Move]) -> None:
        """Begins moves, in this order for each page."""
        with self._lock:
            self._under.update(dict.fromkeys([move.number for move in moves], time.perf_counter()))
        for move in moves:
            last = move.block_hash[-1] if move.block_hash else 0
            self._threads[last % len(self._threads)].submit(self._run, move)

    def take(self) -> dict[int, Moved]:
        """Moves that have ended since the last call, by number."""
        with self._lock:
            if self._timeout_s is not None:
                late = time.perf_counter() - self._timeout_s
                self._give_up([number for number, begun in self._under.items() if begun <= late], self._timeout_s)
            moved, self._moved = self._moved, {}
        return moved

    def close(self) -> None:
        """Waits until all moves have ended, or have had their time."""
        if self._timeout_s is not None:
            deadline = time.perf_counter() + self._timeout_s
            while self._under and time.perf_counter() < deadline:
                time.sleep(0.005)
            with self._lock:
                self._give_up(list(self._under), self._timeout_s)
        for thread in self._threads:
            thread.shutdown(wait=self._timeout_s is None)

    def fill(self, move: Move, page: memoryview) -> None:
        """Gives a page that has been read its slot; `TimeoutError` where it is too late: the slot may be another page's now."""
        with self._lock:
            if move.number not in self._under:
                raise TimeoutError("the page came too late")
            self.slots[move.slot] = np.frombuffer(page, np.uint8)

    def _give_up(self, numbers: Sequence[int], seconds: float) -> None:
        """Moves have failed that have taken too long."""
        for number in numbers:
            del self._under[number]
            self._moved[number] = Moved(seconds, f"no answer within {seconds:g} seconds")

    def _run(self, move: Move) -> None:
        begin, error, found = time.perf_counter(), None, None
        if move.number not in self._under and move.action != "delete":
            return  # given up before its turn
        try:
            found = self._actions[move.action](move)
        except Exception as problem:  # noqa: BLE001 whatever it was, somebody waits for the end of the move
            error = f"{type(problem).__name__}: {problem}"
        with self._lock:
            if self._under.pop(move.number, None) is not None:
                self._moved[move.number] = Moved(time.perf_counter() - begin, error, found or [])
