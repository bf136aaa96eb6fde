"""Sampling on a CPU, compiled; the reference documents arguments and results."""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch

from penstock.kernels.cpu.native import DTYPES
from penstock.kernels.sampling.buffers import Path as SamplingPath
from penstock.kernels.sampling.buffers import SamplingBuffers

_ARGUMENTS = [c_int, c_void_p, *[c_int64] * 2, *[c_void_p] * 4, c_int64, c_void_p, c_int64, c_int, *[c_void_p] * 3]


class NativeSampling:
    """The functions of a library.

    Args:
        library: What `build.library` returned.
    """

    def __init__(self, library: Path) -> None:
        self._sample = ctypes.CDLL(str(library)).penstock_sample
        self._sample.argtypes, self._sample.restype = _ARGUMENTS, None

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        params: torch.Tensor,
        buffers: SamplingBuffers,
        path: SamplingPath,
        masked: bool = False,
        masks: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See the reference; a row costs what it asks for itself, whatever the path.

        `masks` are `at` and `bitmask` as the reference's `mask` takes them: these rows are chosen under masks. Their logits are
        judged as they are, without the masks.
        """
        del path
        logits = (logits if logits.dtype in DTYPES else logits.float()).contiguous()
        count, vocab_size = logits.shape
        result = buffers.rows(count)
        given: tuple[int | None, int, int | None, int] = (None, 0, None, 0)
        if masks is not None:
            at, bitmask = masks[0].contiguous(), masks[1].contiguous()
            given = (at.data_ptr(), at.shape[0], bitmask.data_ptr(), bitmask.shape[1])
        self._sample(
            *(DTYPES[logits.dtype], logits.data_ptr(), count, vocab_size),
            *(rows.data_ptr(), positions.data_ptr(), params.data_ptr()),
            *(*given, masked),
            *(result.data_ptr(), buffers.threshold.data_ptr(), buffers.last_id.data_ptr()),
        )
        return result
