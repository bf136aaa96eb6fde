"""A layer of experts on a GPU: choices are sorted by expert, and each expert's are cut into tiles of rows.

    layout          torch, without a look by the host: which choices a tile has, and whose weights it meets
    grouped linear  program (tile, 64 outputs of its expert): once for gate and up projection, once for the last

The grid is as large as tiles can ever be for so many choices, so that a graph serves every routing; a program whose tile is empty
leaves at once, and the weights of an expert without tokens are not read. A row's sums run over its inputs in one order.
"""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait
from penstock.kernels.experts.reference import combined
from penstock.kernels.experts.table import ExpertTable, PackedExpertTable, PackedLayer
from penstock.kernels.gated_mul.triton import clamped_swiglu, gelu_tanh_mul, silu_mul
from penstock.kernels.quantized_linear.launch import FEW, block_of
from penstock.kernels.quantized_linear.reference import NUMBERS, QuantizedWeight
from penstock.kernels.quantized_linear.rounding import rounded_inputs
from penstock.kernels.quantized_linear.triton import UNITS, packed_product

_TILE, _OUTPUTS, _BLOCK = 16, 64, 64
"""Choices, outputs, and inputs at a time."""


@triton.jit
def _grouped_linear_kernel(
    x, weights_at, biases_at, choices, expert_of, out, IN: tl.constexpr, OUT: tl.constexpr, PER_ROW: tl.constexpr,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    expert = tl.load(expert_of + tl.program_id(0))
    if expert >= 0:
        choice = tl.load(choices + tl.program_id(0) * TILE + tl.arange(0, TILE))
        there = choice >= 0
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        weight = tl.load(weights_at + expert).to(tl.pointer_type(x.dtype.element_ty))
        row = (choice // PER_ROW).to(tl.int64)
        total = tl.zeros((TILE, OUTPUTS), tl.float32)
        for first in range(0, IN, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inputs = tl.load(x + row[:, None] * IN + at[None, :], there[:, None] & (at < IN)[None, :], 0.0)
            place = weight + output.to(tl.int64)[None, :] * IN + at[:, None]
            part = tl.load(place, (output < OUT)[None, :] & (at < IN)[:, None], 0.0)
            total = tl.dot(inputs, part, total, input_precision="ieee")
        if biases_at is not None:
            bias = tl.load(biases_at + expert).to(tl.pointer_type(x.dtype.element_ty))
            total += tl.load(bias + output, output < OUT, 0.0).to(tl.float32)[None, :]
        target = out + choice.to(tl.int64)[:, None] * OUT + output[None, :]
        tl.store(target, total, there[:, None] & (output < OUT)[None, :])


@triton.jit
def _grouped_packed_kernel(
    x, tensors_at, scales_like, choices, expert_of, out, IN: tl.constexpr, OUT: tl.constexpr, PER_ROW: tl.constexpr,
    GROUP: tl.constexpr, NUMBER: tl.constexpr, UNIT: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    expert = tl.load(expert_of + tl.program_id(0))
    if expert >= 0:
        choice = tl.load(choices + tl.program_id(0) * TILE + tl.arange(0, TILE))
        there = choice >= 0
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        tensors = tensors_at + expert * 7  # as `PackedLayer.tensors` orders them
        values = tl.load(tensors).to(tl.pointer_type(tl.int8))
        scales = tl.load(tensors + 1).to(tl.pointer_type(scales_like.dtype.element_ty))
        zeros_at = tl.load(tensors + 2)
        total = packed_product(
            x + (choice // PER_ROW).to(tl.int64) * IN, there, output, values, scales, zeros_at.to(tl.pointer_type(tl.int8)),
            zeros_at != 0, IN, OUT, GROUP, NUMBER, UNIT, ZEROS, TILE, OUTPUTS, BLOCK,
        )  # fmt: skip
        if BIAS:
            bias = tl.load(tensors + 3).to(tl.pointer_type(x.dtype.element_ty))
            total += tl.load(bias + output, output < OUT, 0.0).to(tl.float32)[None, :]
        target = out + choice.to(tl.int64)[:, None] * OUT + output[None, :]
        tl.store(target, total, there[:, None] & (output < OUT)[None, :])


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, table: ExpertTable) -> torch.Tensor:
    """See the reference, of whose MLPs the table holds the weights; contiguous."""
    tokens, k = ids.shape
    if not tokens:
        return torch.empty_like(x)
    layout = _layout(ids.flatten().long(), len(table.gate_up))
    projected = x.new_empty(tokens * k, 2 * table.inner)
    biases_at = table.biases_at or (None, None)
    _grouped_linear(x, table.gate_up_at, biases_at[0], layout, projected, k)
    gated = _gated(projected, table)
    found = x.new_empty(tokens * k, table.hidden)
    _grouped_linear(gated, table.down_at, biases_at[1], layout, found, 1)
    return combined(found.view(tokens, k, table.hidden), weights)


def packed_experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, table: PackedExpertTable) -> torch.Tensor:
    """The same over weights of few bits; inputs are rounded as the experts ask for."""
    tokens, k = ids.shape
    if not tokens:
        return torch.empty_like(x)
    chosen = ids.flatten().long()
    layout = _layout(chosen, len(table.gate_up))
    inputs, per_row = _rounded(x, table.gate_up, chosen, k)
    projected = x.new_empty(tokens * k, 2 * table.inner)
    _grouped_packed(inputs, table.gate_up, table.gate_up_at, layout, projected, per_row)
    gated, _ = _rounded(_gated(projected, table), table.down, chosen, 1)
    found = x.new_empty(tokens * k, table.hidden)
    _grouped_packed(gated, table.down, table.down_at, layout, found, 1)
    return combined(found.view(tokens, k, table.hidden), weights)


def _rounded(x: torch.Tensor, layers: Sequence[PackedLayer], chosen: torch.Tensor, per_row: int) -> tuple[torch.Tensor, int]:
    """Inputs as the experts round them, contiguous, and how many choices a row serves: one, if each expert has its own scale."""
    rule = layers[0].rounding
    if rule is None:
        return x, per_row
    if rule.dynamic:
        return rounded_inputs(x, rule).contiguous(), per_row  # a shorter last group leaves gaps
    scales = torch.cat([layer.input_scale for layer in layers if layer.input_scale is not None])
    zeros = [layer.input_zero for layer in layers if layer.input_zero is not None]
    own = [values[chosen, None] for values in (scales, *([torch.cat(zeros)] if zeros else []))]
    return rounded_inputs(x.repeat_interleave(per_row, 0), rule, *own), 1


def _gated(projected: torch.Tensor, table: ExpertTable | PackedExpertTable) -> torch.Tensor:
    if table.gate == "clamped_swiglu":
        return clamped_swiglu(projected, *table.clamp)
    return silu_mul(projected) if table.gate == "silu" else gelu_tanh_mul(projected)


def _layout(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices of each tile, [tiles · 16], -1 where there is none, and each tile's expert, -1 where it is empty.

    Args:
        ids: [choices], int64: each choice's expert.
        experts: How many there are.
    """
    count, numbers = len(ids), torch.arange(len(ids), device=ids.device)
    order = torch.argsort(ids, stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
    ends = ((counts + _TILE - 1) // _TILE * _TILE).cumsum(0)
    starts = ends - (counts + _TILE - 1) // _TILE * _TILE
    firsts = counts.cumsum(0) - counts
    by_expert = ids[order]
    tiles = min(count, -(-count // _TILE) + experts)
    choices = torch.full((tiles * _TILE,), -1, dtype=torch.int64, device=ids.device)
    choices.scatter_(0, starts[by_expert] + numbers - firsts[by_expert], order)
    begins = torch.arange(tiles, device=ids.device) * _TILE
    owners = (begins[:, None] >= ends[None, :]).sum(1)
    return choices.int(), torch.where(owners < experts, owners, -1).int()


def _grouped_linear(
    x: torch.Tensor,
    weights_at: torch.Tensor,
    biases_at: torch.Tensor | None,
    layout: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    per_row: int,
) -> None:
    choices, expert_of = layout
    sizes = {"IN": x.shape[1], "OUT": out.shape[1], "PER_ROW": per_row, "TILE": _TILE, "OUTPUTS": _OUTPUTS, "BLOCK": _BLOCK}
    grid = (len(expert_of), triton.cdiv(out.shape[1], _OUTPUTS))
    _grouped_linear_kernel[grid](x, weights_at, biases_at, choices, expert_of, out, **sizes, **early(x.device), num_warps=4)


def _grouped_packed(
    x: torch.Tensor,
    layers: Sequence[PackedLayer],
    tensors_at: torch.Tensor,
    layout: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    per_row: int,
) -> None:
    choices, expert_of = layout
    first = layers[0].weight
    assert isinstance(first, QuantizedWeight), "whole numbers meet on a CPU alone"
    _grouped_packed_kernel[(len(expert_of), triton.cdiv(out.shape[1], _OUTPUTS))](
        *(x, tensors_at, first.scales, choices, expert_of, out),
        IN=x.shape[1],
        OUT=out.shape[1],
        PER_ROW=per_row,
        GROUP=first.group,
        NUMBER=NUMBERS.index(first.number),
        UNIT=UNITS[first.number],
        ZEROS=any(layer.weight.zeros is not None for layer in layers),
        BIAS=layers[0].bias is not None,
        TILE=_TILE,
        OUTPUTS=_OUTPUTS,
        BLOCK=block_of(FEW, first.group),
        **early(x.device),
        num_warps=4,
    )
