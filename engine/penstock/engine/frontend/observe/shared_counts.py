"""What several frontends count, in memory that they share: each writes a row of its own, and any of them can tell the sum."""

import mmap
import os

import numpy as np

from penstock.engine.frontend.observe.series import SeriesTable


class SharedCounts:
    """A table in anonymous memory, [frontends, numbers], that is inherited by its file descriptor. It survives a frontend that
    dies, whose row its successor goes on counting in: sums never fall.

    Args:
        descriptor: Of the memory; see `create`.
        rows: Frontends.
        row: This one's.
    """

    def __init__(self, descriptor: int, rows: int, row: int) -> None:
        self._descriptor = descriptor
        self._rows = rows
        self._row = row

    @staticmethod
    def create(rows: int, size: int) -> int:
        """Make the memory for rows of numbers, and return its file descriptor."""
        descriptor = os.memfd_create("penstock-counts")
        os.ftruncate(descriptor, rows * size * np.dtype(np.float64).itemsize)
        return descriptor

    def join(self, table: SeriesTable) -> None:
        """Has a table count here from now on."""
        memory = mmap.mmap(self._descriptor, 0)
        table.share(np.frombuffer(memory, np.float64).reshape(self._rows, table.size), self._row)
