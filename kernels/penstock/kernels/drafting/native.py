"""Drafts by looking back, compiled; the reference documents arguments and results."""

import ctypes
import weakref
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from penstock.kernels.drafting.reference import Int32

_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "penstock_ngram_drafts": ([c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 4, c_void_p], None),
    "penstock_suffix_new": ([c_int64] * 3, c_void_p),
    "penstock_suffix_free": ([c_void_p], None),
    "penstock_suffix_add": ([c_void_p, c_void_p, c_int64], None),
    "penstock_suffix_drafts": (
        [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 3, *[c_double] * 2, c_void_p],
        None,
    ),
}


class NativeDrafting:
    """The functions of a library.

    Args:
        library: What `build.library` returned.
    """

    def __init__(self, library: Path) -> None:
        self._library: Any = ctypes.CDLL(str(library))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, result
        self._table = _Table()

    def ngram_drafts(self, token_ids: Int32, rows: Int32, lengths: Int32, shortest: int, longest: int, most: int) -> Int32:
        """See the reference."""
        drafts = np.empty((len(rows), most), np.int32)
        pointers, limits = (*self._table.of(token_ids), _ints(rows), _ints(lengths)), (len(rows), shortest, longest, most)
        self._library.penstock_ngram_drafts(*pointers, *limits, drafts.ctypes.data)
        return drafts

    def history(self, max_sequences: int, capacity: int, depth: int) -> "NativeSuffixHistory":
        """An empty one."""
        return NativeSuffixHistory(self._library, max_sequences, capacity, depth)


class NativeSuffixHistory:
    """See the reference's `SuffixHistory`."""

    def __init__(self, library: Any, max_sequences: int, capacity: int, depth: int) -> None:
        self._library, self._depth, self._table = library, depth, _Table()
        self._handle = library.penstock_suffix_new(max_sequences, capacity, depth)
        weakref.finalize(self, library.penstock_suffix_free, self._handle)

    def add(self, token_ids: Int32) -> None:
        """See the reference."""
        tokens = np.ascontiguousarray(token_ids, np.int32)
        self._library.penstock_suffix_add(self._handle, tokens.ctypes.data, len(tokens))

    def drafts(self, token_ids: Int32, rows: Int32, lengths: Int32, most: int, factor: float, min_probability: float) -> Int32:
        """See the reference."""
        drafts = np.empty((len(rows), most), np.int32)
        pointers = (*self._table.of(token_ids), _ints(rows), _ints(lengths))
        limits = (len(rows), self._depth, most, factor, min_probability)
        self._library.penstock_suffix_drafts(self._handle, *pointers, *limits, drafts.ctypes.data)
        return drafts


class _Table:
    """The table of the last call, which is that of the next one: NumPy's address of it takes as long as a row's drafts."""

    def __init__(self) -> None:
        self._last: Int32 | None = None
        self._found = (0, 0)

    def of(self, token_ids: Int32) -> tuple[int, int]:
        """Its address and its stride."""
        if token_ids is not self._last:
            assert token_ids.dtype == np.int32 and token_ids.flags.c_contiguous
            self._last, self._found = token_ids, (token_ids.ctypes.data, token_ids.shape[1])
        return self._found


def _ints(values: Int32) -> bytes:
    """As the library reads them: a copy costs less than an address."""
    return values.astype(np.int32, copy=False).tobytes()
