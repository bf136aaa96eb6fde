"""The operations of a model step, each in the form that suits the device; chosen once at start."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.kernels.paged_attention.batch import PagedBatch
from penstock.kernels.paged_attention.reference import paged_attention
from penstock.kernels.prepare_kv.reference import QKNorm, Rotary, prepare_kv
from penstock.kernels.rms_norm.reference import add_rms_norm, rms_norm
from penstock.kernels.silu_mul.reference import silu_mul


@dataclass(frozen=True)
class Ops:
    """One form of every operation; the reference documents arguments and results."""

    form: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    prepare_kv: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Rotary, QKNorm | None], torch.Tensor
    ]
    paged_attention: Callable[[torch.Tensor, torch.Tensor, PagedBatch, float], torch.Tensor]


REFERENCE = Ops(
    form="reference",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    prepare_kv=prepare_kv,
    paged_attention=paged_attention,
)


def ops_for(device: str) -> Ops:
    """The best form there is on a device; ValueError where there is none."""
    if device != "cpu":
        raise ValueError(f"no kernels for the device {device!r} (supported: cpu)")
    return REFERENCE
