"""The operations of a model step, each in the form that suits the device; chosen once at start."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.kernels.cpu.build import BuildError, library
from penstock.kernels.cpu.native import DTYPES, NativeOps
from penstock.kernels.gated_mul.reference import gelu_tanh_mul, silu_mul
from penstock.kernels.paged_attention.batch import PagedBatch
from penstock.kernels.paged_attention.reference import paged_attention
from penstock.kernels.prepare_kv.reference import QKNorm, Rotary, prepare_kv
from penstock.kernels.rms_norm.reference import add_rms_norm, rms_norm

log = logging.getLogger(__name__)

CACHE = Path("~/.cache/penstock/kernels")
"""Where compiled operations are kept."""


@dataclass(frozen=True)
class Ops:
    """One form of every operation; the reference documents arguments and results."""

    form: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_mul: Callable[[torch.Tensor], torch.Tensor]
    prepare_kv: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Rotary, QKNorm | None], torch.Tensor
    ]
    paged_attention: Callable[[torch.Tensor, torch.Tensor, PagedBatch, float, float], torch.Tensor]


REFERENCE = Ops(
    form="reference",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    prepare_kv=prepare_kv,
    paged_attention=paged_attention,
)


def native_ops(dtype: torch.dtype, cache: Path) -> Ops:
    """The compiled form; BuildError where it cannot be had."""
    if dtype not in DTYPES:
        raise BuildError(f"{dtype} has no compiled form")
    native = NativeOps(library(cache), dtype)
    return Ops(
        form="native",
        rms_norm=native.rms_norm,
        add_rms_norm=native.add_rms_norm,
        silu_mul=native.silu_mul,
        gelu_tanh_mul=native.gelu_tanh_mul,
        prepare_kv=native.prepare_kv,
        paged_attention=native.paged_attention,
    )


def ops_for(device: str, dtype: torch.dtype) -> Ops:
    """The best form there is on a device; ValueError where there is none."""
    if device != "cpu":
        raise ValueError(f"no kernels for the device {device!r} (supported: cpu)")
    try:
        return native_ops(dtype, CACHE.expanduser())
    except BuildError as error:
        log.warning("kernels: torch's reference, several times slower than the native ones (%s)", error)
        return REFERENCE
