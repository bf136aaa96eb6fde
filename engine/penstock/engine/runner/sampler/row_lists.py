"""Lists of different length by request row, all in one array: a step picks those of its rows without a loop."""

from typing import Any

import numpy as np
import numpy.typing as npt


def spread(lengths: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Lists of these lengths [m], one after the other: for each entry its list, [n], and its place in that, [n]."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    return owners, np.arange(len(owners)) - (np.cumsum(lengths) - lengths)[owners]


class RowLists:
    """A list for each of `max_num_seqs` rows, empty at first; entries are of one dtype."""

    def __init__(self, max_num_seqs: int, dtype: npt.DTypeLike) -> None:
        self._dtype = dtype
        self._lists: dict[int, npt.NDArray[Any]] = {}
        self._flat = np.empty(0, dtype)
        self._starts = np.zeros(max_num_seqs, np.int64)
        self._lengths = np.zeros(max_num_seqs, np.int64)
        self._stale = False

    def put(self, row: int, entries: npt.NDArray[Any]) -> bool:
        """Replaces a row's list; says whether it has anything now."""
        self._lists.pop(row, None)
        self._lengths[row] = len(entries)
        if len(entries):
            self._lists[row] = entries
            self._stale = True
        return len(entries) > 0

    def has(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """[m]: whether the list of each of these rows has anything."""
        return self._lengths[rows] > 0

    def of(self, rows: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """The entries of rows [m], one list after the other.

        Returns:
            [n]: to which of the m each belongs; and [n]: the entries.
        """
        if self._stale:
            self._flatten()
        owners, places = spread(self._lengths[rows])
        return owners, self._flat[self._starts[rows][owners] + places]

    def _flatten(self) -> None:
        start = 0
        for row, entries in self._lists.items():
            self._starts[row] = start
            start += len(entries)
        self._flat = np.concatenate([np.empty(0, self._dtype), *self._lists.values()])
        self._stale = False
