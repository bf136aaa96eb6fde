"""The operations of a model step, each in the form that suits the device; chosen once at start."""

import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.kernels.collective.native import NativeCollectives
from penstock.kernels.cpu.build import CACHE, BuildError, library
from penstock.kernels.cpu.isa import Isa, IsaName, choose
from penstock.kernels.cpu.native import DTYPES, NativeOps
from penstock.kernels.cpu.tape import Pool, Tape
from penstock.kernels.embedding.reference import embedding
from penstock.kernels.experts.reference import MLP, combine_rows, experts, experts_on_device
from penstock.kernels.experts.routing import Routing, route
from penstock.kernels.experts.table import ExpertTable, PackedExpertTable
from penstock.kernels.few_rows import reference as few_rows
from penstock.kernels.few_rows.reference import Activation
from penstock.kernels.float8_linear.reference import Float8Weight
from penstock.kernels.gated_mul.reference import clamped_swiglu, gelu_tanh_mul, silu_mul
from penstock.kernels.head_linear.reference import HeadWeight, head_linear, pack_heads
from penstock.kernels.integer_linear.reference import IntegerWeight, integer_linear
from penstock.kernels.lora import device_reference as device_lora
from penstock.kernels.lora.batch import lora_shelves
from penstock.kernels.lora.device import DeviceLoraShelves
from penstock.kernels.lora.packed import PackedLoraShelves
from penstock.kernels.lora.reference import add_lora
from penstock.kernels.paged_attention.device_reference import paged_attention_device
from penstock.kernels.paged_attention.reference import paged_attention
from penstock.kernels.prepare_kv.reference import prepare_kv
from penstock.kernels.quantized_linear.reference import QuantizedWeight, quantized_linear
from penstock.kernels.quantized_linear.rounding import Rounding, rounded_inputs
from penstock.kernels.rms_norm.reference import add_rms_norm, rms_norm

log = logging.getLogger(__name__)

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

FLOAT8_CAPABILITY = (8, 9)
"""Compute capability from which on GPUs multiply numbers in E4M3."""
FEW_ROWS = ("norm_linear", "norm_gated_linear", "linear_add")


@dataclass(frozen=True)
class Ops:
    """One form of every operation; the reference documents arguments and results."""

    form: str
    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_mul: Callable[[torch.Tensor], torch.Tensor]
    clamped_swiglu: Callable[[torch.Tensor, float, float], torch.Tensor]
    prepare_kv: Callable[..., torch.Tensor]
    """It and the next one take scales of a cache of eight bits."""
    paged_attention: Callable[..., torch.Tensor]
    """Over a `PagedBatch` on the CPU; over a `DeviceBatch` on a device, where it also takes `out`."""
    lora_shelves: Callable[[int, int, int, Sequence[tuple[int, int]], torch.dtype, torch.device], Iterable[Any]]
    add_lora: Callable[[torch.Tensor, torch.Tensor, Any, Any], None]
    """With what `lora_shelves` made, and a `LoraBatch` on the CPU, a `DeviceLoraBatch` on a device."""
    quantized_linear: Callable[[torch.Tensor, QuantizedWeight, torch.Tensor | None], torch.Tensor] = quantized_linear
    """Over a weight of few bits. The CPU's compiled form has one thread; the reference dequantizes the weight at each call."""
    rounded_inputs: Callable[[torch.Tensor, Rounding, torch.Tensor | None, torch.Tensor | None], torch.Tensor] = rounded_inputs
    """What some quantized layers multiply in place of their inputs."""
    integer_linear: (
        Callable[
            [torch.Tensor, IntegerWeight, Rounding, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], torch.Tensor
        ]
        | None
    ) = None
    """Over a weight of whole numbers and inputs that are rounded to such, in one thread; None: this form rounds inputs by
    `rounded_inputs` and multiplies in the model's dtype."""
    float8_linear: (
        Callable[[torch.Tensor, Float8Weight, Rounding, torch.Tensor | None, torch.Tensor | None], torch.Tensor] | None
    ) = None
    """Over a weight in E4M3 and inputs that are rounded to it, on a device that multiplies such; None: as of `integer_linear`."""
    head_linear: Callable[[torch.Tensor, HeadWeight], torch.Tensor] = head_linear
    pack_heads: Callable[[torch.Tensor], HeadWeight] = pack_heads
    """Makes the weight for `head_linear`."""
    route: Callable[[torch.Tensor, torch.Tensor | None, Routing], tuple[torch.Tensor, torch.Tensor]] = route
    any_experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[MLP]], torch.Tensor] = experts
    """Over MLPs of any kind, each run by itself."""
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertTable], torch.Tensor] | None = None
    """Over weights as `linear` or, on a device, torch has them; None: this form has `any_experts` alone."""
    packed_experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedExpertTable], torch.Tensor] | None = None
    """Over weights of few bits, on a CPU in one thread; None: this form has `any_experts` alone."""
    combine_experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = combine_rows
    """The sum at the end of `experts` and `packed_experts`, with the same bits; at the end of `any_experts` it is the
    reference's."""
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor] | None = None
    """Over a weight from `linear.reference.pack_weight`, in one thread; None: this form leaves it to torch."""
    norm_linear: Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None
    """This and the next two are linear layers of up to `few_rows.MAX_ROWS` rows, over weights as torch has them, with what stands
    around them; None: this form leaves them in parts."""
    norm_gated_linear: (
        Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor | None, Activation], torch.Tensor] | None
    ) = None
    linear_add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor] | None = None
    tape: Callable[[Callable[[], torch.Tensor], Pool], Tape] | None = None
    """Takes down what a function of these operations does, so that it can be done again by itself; None: there is no such
    thing in this form."""
    collectives: NativeCollectives | None = None
    """What processes on one machine exchange, as tapes can take it down; None: this form has nothing of the kind."""


REFERENCE = Ops(
    form="reference",
    embedding=embedding,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    clamped_swiglu=clamped_swiglu,
    prepare_kv=prepare_kv,
    paged_attention=paged_attention,
    lora_shelves=lora_shelves,
    add_lora=add_lora,
    integer_linear=integer_linear,
)


def native_ops(dtype: torch.dtype, isa: Isa, cache: Path) -> Ops:
    """The compiled form for an instruction set; BuildError where it cannot be had."""
    if dtype not in DTYPES:
        raise BuildError(f"{dtype} has no compiled form")
    native = NativeOps(library(isa, cache), dtype)
    return Ops(
        form=f"native {isa.name}",
        embedding=embedding,
        rms_norm=native.rms_norm,
        add_rms_norm=native.add_rms_norm,
        silu_mul=native.silu_mul,
        gelu_tanh_mul=native.gelu_tanh_mul,
        clamped_swiglu=native.clamped_swiglu,
        prepare_kv=native.prepare_kv,
        paged_attention=native.paged_attention,
        lora_shelves=PackedLoraShelves,
        add_lora=native.add_lora,
        head_linear=native.head_linear,
        pack_heads=native.pack_heads,
        route=native.route,
        experts=native.experts,
        packed_experts=native.packed_experts,
        combine_experts=native.combine_experts,
        linear=native.linear,
        quantized_linear=native.quantized_linear,
        rounded_inputs=native.rounded_inputs,
        integer_linear=native.integer_linear,
        tape=native.tape,
        collectives=native.collectives,
    )


def native_collectives(isa: IsaName | None = None) -> NativeCollectives:
    """The compiled exchanges of processes, for operations that are not compiled; BuildError where they cannot be had."""
    return NativeCollectives.load(library(choose(isa), CACHE.expanduser()))


def device_reference_ops() -> Ops:
    """Plain torch on whatever device the tensors are, without a look at their values by the host: what a step on a GPU does, for
    tests without one."""
    return replace(
        REFERENCE,
        form="device reference",
        paged_attention=paged_attention_device,
        lora_shelves=DeviceLoraShelves,
        add_lora=device_lora.add_lora,
        any_experts=experts_on_device,
        integer_linear=None,
        norm_linear=few_rows.norm_linear,
        norm_gated_linear=few_rows.norm_gated_linear,
        linear_add=few_rows.linear_add,
    )


def triton_ops(dtype: torch.dtype, capability: tuple[int, int] = (0, 0)) -> Ops:
    """Triton's kernels, for a GPU, for `compile_only`, or for Triton's interpreter; ValueError where there is no Triton, or none
    for the dtype.

    Args:
        dtype: Of the model.
        capability: Compute capability of the GPU, which has instructions for numbers of eight bits or not.
    """
    if dtype not in TRITON_DTYPES:
        raise ValueError(f"no Triton kernels for {dtype} (supported: {', '.join(map(str, TRITON_DTYPES))})")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("no Triton kernels: the package triton is not installed")
    from penstock.kernels.embedding import triton as embeddings
    from penstock.kernels.experts import triton as mixtures
    from penstock.kernels.few_rows import triton as few
    from penstock.kernels.float8_linear import triton as eight_bits
    from penstock.kernels.gated_mul import triton as gated_mul
    from penstock.kernels.lora import triton as lora
    from penstock.kernels.paged_attention import triton as attention
    from penstock.kernels.prepare_kv import triton as kv
    from penstock.kernels.quantized_linear import triton as packed
    from penstock.kernels.rms_norm import triton as norms

    return Ops(
        form="triton",
        embedding=embeddings.embedding,
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        silu_mul=gated_mul.silu_mul,
        gelu_tanh_mul=gated_mul.gelu_tanh_mul,
        clamped_swiglu=gated_mul.clamped_swiglu,
        prepare_kv=kv.prepare_kv,
        paged_attention=attention.paged_attention,
        lora_shelves=DeviceLoraShelves,
        add_lora=lora.add_lora,
        any_experts=experts_on_device,
        experts=mixtures.experts,
        quantized_linear=packed.quantized_linear,
        # With a scale for each row, torch gives a result in bfloat16 alone.
        float8_linear=eight_bits.float8_linear if dtype is torch.bfloat16 and capability >= FLOAT8_CAPABILITY else None,
        packed_experts=mixtures.packed_experts,
        # What is not normalised yet goes beyond the range of float16.
        **{} if dtype == torch.float16 else {name: getattr(few, name) for name in FEW_ROWS},
    )


def ops_for(device: str, dtype: torch.dtype, isa: IsaName | None = None) -> Ops:
    """The best form there is on a device, `cpu`, `cuda` or one of several as in `cuda:1`; ValueError where there is none.

    Args:
        device: Where the operations run.
        dtype: Of the model.
        isa: The instruction set on a CPU; None: the best that it has.
    """
    kind = device.partition(":")[0]
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"no kernels for the device {device!r}: torch sees no CUDA device")
        return triton_ops(dtype, torch.cuda.get_device_capability(device))
    if kind != "cpu":
        raise ValueError(f"no kernels for the device {device!r} (supported: cpu, cuda)")
    try:
        return native_ops(dtype, choose(isa), CACHE.expanduser())
    except BuildError as error:
        log.warning("kernels: torch's reference, several times slower than the native ones (%s)", error)
        return REFERENCE
