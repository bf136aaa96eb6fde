"""Collectives of processes that share memory, compiled; see `cpu/collective.cpp`."""

import ctypes
from collections.abc import Mapping
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Int64 = npt.NDArray[np.int64]
DTYPES: Final[Mapping[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

SIGNATURES: Final[Mapping[str, list[Any]]] = {
    "penstock_all_reduce": [c_int, *[c_void_p] * 3, c_int64],
    "penstock_all_gather": [c_int, *[c_void_p] * 3, *[c_int64] * 2],
}
"""Those that a tape takes down."""
_OTHERS: Final[Mapping[str, list[Any]]] = {
    "penstock_broadcast": [c_void_p, c_char_p, c_int64, c_int32],
    "penstock_barrier": [c_void_p],
    "penstock_gather_parts": [c_void_p] * 6,
    "penstock_fail": [c_void_p, c_int32],
    "penstock_receive": [c_void_p, c_int32],
}

TIMEOUT: Final = 1
MISMATCH: Final = 2
FAILED: Final = 3
"""In `GroupView.error`."""
KINDS: Final = ("all-reduce", "all-gather", "broadcast", "barrier", "gather of parts")
"""By `GroupView.own_kind`."""


class Wire(ctypes.Structure):
    """A socket to another node, and the rank that reads it there; the library has the same fields."""

    _fields_ = (("fd", c_int32), ("rank", c_int32))


class GroupView(ctypes.Structure):
    """One process's view of a group; the library has the same fields."""

    _fields_ = (
        ("memory", c_void_p),
        ("data", c_int64),
        ("slot_bytes", c_int64),
        ("timeout_ns", c_int64),
        ("spin_ns", c_int64),
        ("rank", c_int32),
        ("world", c_int32),
        ("number", c_uint32),
        ("error", c_int32),
        ("error_rank", c_int32),
        ("own_kind", c_int32),
        ("other_kind", c_int32),
        ("own_dtype", c_int32),
        ("other_dtype", c_int32),
        ("own_bytes", c_int64),
        ("other_bytes", c_int64),
        ("wires", c_void_p),
        ("num_wires", c_int64),
    )


class NativeCollectives:
    """The functions of a library. All ranks call them in the same order; what goes wrong is left in the `GroupView`, and every
    call after it returns at once with undefined results.

    Args:
        library: Of the compiled operations, with the signatures of those that tapes take down.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        """While a tape is recorded, what listens in its place."""
        for name, arguments in _OTHERS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.penstock_receive.restype = c_int32

    @classmethod
    def load(cls, library: Path) -> "NativeCollectives":
        """Of the library that `build.library` returned."""
        loaded = ctypes.CDLL(str(library))
        for name, arguments in SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, None
        return cls(loaded)

    def all_reduce(self, group: int, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`.

        Args:
            group: Address of a `GroupView`.
            x: Of one of DTYPES.
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        self.library.penstock_all_reduce(DTYPES[x.dtype], group, x.data_ptr(), out.data_ptr(), x.numel())
        return out

    def all_gather(self, group: int, x: torch.Tensor, world: int) -> torch.Tensor:
        """[n, k] of each rank → [n, world · k]."""
        x = x.contiguous()
        rows, columns = x.shape
        out = x.new_empty(rows, world * columns)
        sizes = (rows, columns * x.element_size())
        self.library.penstock_all_gather(DTYPES[x.dtype], group, x.data_ptr(), out.data_ptr(), *sizes)
        return out

    def gather_parts(
        self, group: int, x: torch.Tensor, sizes: npt.NDArray[np.int64], kept: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Some of the bytes that each rank gives.

        Args:
            group: Address of a `GroupView`.
            x: Uint8, [sizes[rank]], contiguous.
            sizes: [ranks]: bytes that each rank gives, on all ranks alike.
            kept: [2, ranks]: where the bytes of each that this rank wants begin and end.

        Returns:
            Uint8: one rank's behind another's.
        """
        out = torch.empty(int((kept[1] - kept[0]).sum()), dtype=torch.uint8)
        columns = (sizes.ctypes.data, kept[0].ctypes.data, kept[1].ctypes.data)
        self.library.penstock_gather_parts(group, x.data_ptr(), out.data_ptr(), *columns)
        return out
