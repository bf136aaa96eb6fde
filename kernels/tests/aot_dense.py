"""Launches of the dense operations and of adapters, as `aot_gates.py` compiles them: for so many tokens, few."""

import torch

from penstock.kernels.embedding.triton import embedding
from penstock.kernels.experts.table import ExpertTable, PackedExpertTable, PackedLayer
from penstock.kernels.experts.triton import experts, packed_experts
from penstock.kernels.few_rows import triton as few
from penstock.kernels.float8_linear.triton import float8_numbers
from penstock.kernels.gated_mul.triton import clamped_swiglu, gelu_tanh_mul, silu_mul
from penstock.kernels.lora.device import DeviceLoraBatch, DeviceLoraShelves
from penstock.kernels.lora.triton import add_lora
from penstock.kernels.prepare_kv.cache_rows import FLOATS_OF_EIGHT_BITS, row_size
from penstock.kernels.prepare_kv.reference import QKNorm, Rotary
from penstock.kernels.prepare_kv.triton import prepare_kv
from penstock.kernels.quantized_linear.reference import LANES, Number, QuantizedWeight
from penstock.kernels.quantized_linear.rounding import Rounding
from penstock.kernels.quantized_linear.triton import quantized_linear
from penstock.kernels.rms_norm.triton import add_rms_norm, rms_norm

HIDDEN = 4096
DTYPE = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def norms(tokens: int = 16) -> None:
    """RMSNorm with and without the residual stream, and of short rows."""
    x, weight = empty(tokens, HIDDEN), empty(HIDDEN, dtype=torch.float32)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    rms_norm(empty(tokens, 32, 128), empty(128, dtype=torch.float32), 1e-5)


def gates(tokens: int = 16) -> None:
    """Of an MLP's hidden layer."""
    silu_mul(empty(tokens, 2 * 14336))
    gelu_tanh_mul(empty(tokens, 2 * 14336))
    clamped_swiglu(empty(tokens, 2 * 2880), 1.702, 7.0)


def few_rows(tokens: int = 16) -> None:
    """A layer of 8 billion parameters."""
    count = min(tokens, few.MAX_ROWS)
    x, norm = empty(count, HIDDEN), empty(HIDDEN, dtype=torch.float32)
    few.norm_linear(x, norm, 1e-5, empty(6144, HIDDEN), None)
    few.linear_add(x, empty(HIDDEN, HIDDEN), None, x)
    few.norm_gated_linear(x, norm, 1e-5, empty(2 * 14336, HIDDEN), None, "silu")
    few.linear_add(empty(count, 14336), empty(HIDDEN, 14336), None, x)


def tables(tokens: int = 16) -> None:
    """Embedding and rotary angles."""
    ids = empty(tokens, dtype=torch.int32)
    embedding(empty(128256, HIDDEN), ids)
    embedding(empty(8192, 128, dtype=torch.float32), ids)


def writes(tokens: int = 16) -> None:
    """The way into the cache: Llama 8B's, Qwen3's with norms, Gemma's wide heads, Phi's partial rotation."""
    for heads, kv_heads, size, rotated, normalised in (
        (32, 8, 128, 128, False),
        (16, 8, 128, 128, True),
        (8, 4, 256, 256, True),
        (24, 8, 128, 96, False),
    ):
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        q, k, v = (part.view(tokens, -1, size) for part in empty(tokens, sum(sizes)).split(sizes, -1))
        cache = empty(100, 32, 2 * kv_heads * 16 * size)[:, 0].view(100, 2, kv_heads, 16, size)
        rotary = Rotary(*empty(tokens, rotated, dtype=torch.float32).chunk(2, -1))
        weights = (empty(size, dtype=torch.float32) for _ in range(2))
        norm = QKNorm(*weights, 1e-6) if normalised else None
        prepare_kv(q, k, v, cache, empty(tokens, dtype=torch.int64), rotary, norm)


def adapters(tokens: int = 16) -> None:
    """On the fused projection, few tokens and many, narrow and wide."""
    for rank in (16, 128):
        parts = [(0, HIDDEN), (HIDDEN, 1024), (HIDDEN + 1024, 1024)]
        shelves = DeviceLoraShelves(8, rank, HIDDEN, parts, DTYPE, torch.device("meta"))
        for count in (tokens, 2000 + tokens):
            batch = DeviceLoraBatch(empty(4096, dtype=torch.int32))
            add_lora(empty(count, HIDDEN + 2048), empty(count, HIDDEN), shelves, batch)


def mixtures(tokens: int = 16) -> None:
    """Experts as Qwen3-30B-A3B has them, and those of gpt-oss-20b."""
    gate_up, down = ([empty(*size)] * 128 for size in ((2 * 768, 2048), (2048, 768)))
    biased = ([empty(*size)] * 32 for size in ((2 * 2880, 2880), (2880, 2880), (2 * 2880,), (2880,)))
    oss_gate_up, oss_down, *biases = biased
    for table, k in (
        (ExpertTable(gate_up, down, 2048, 768, "silu"), 8),
        (ExpertTable(oss_gate_up, oss_down, 2880, 2880, "clamped_swiglu", (1.702, 7.0), (biases[0], biases[1])), 4),
    ):
        ids, weights = empty(tokens, k, dtype=torch.int32), empty(tokens, k, dtype=torch.float32)
        experts(empty(tokens, table.hidden), ids, weights, table)


def packed(outputs: int, inputs: int, number: Number, group: int, zeros: bool = False) -> QuantizedWeight:
    """A weight of few bits without memory."""
    panels, pairs, groups = outputs // LANES, inputs // 2, inputs // group
    values = empty(panels, pairs, 1 if number in ("int4", "e2m1") else 2, LANES, dtype=torch.int8)
    scales = empty(panels, groups, LANES, dtype=torch.float32 if group == inputs else DTYPE)
    points = empty(panels, groups, LANES, dtype=torch.int8) if zeros else None
    return QuantizedWeight(values, scales, points, number, group, outputs, inputs)


FEW_BITS: list[tuple[Number, int, bool]] = [
    ("int8", HIDDEN, False),
    ("int4", 32, False),
    ("int4", 128, True),
    ("e4m3", HIDDEN, False),
    ("e4m3", 128, False),
    ("e2m1", 32, False),
]
"""Numbers, groups, and whether there are zero points."""


def few_bits(tokens: int = 16) -> None:
    """Linear layers of few bits: one decode, several, prompts."""
    for number, group, zeros in FEW_BITS:
        dtype = torch.float16 if group == 128 else DTYPE
        for count in (tokens, 40 + tokens, 2000 + tokens)[: 3 if group < HIDDEN else 2]:
            quantized_linear(empty(count, HIDDEN, dtype=dtype), packed(HIDDEN, HIDDEN, number, group, zeros), None)
    for rule, scale in ((Rounding("float8", True), None), (Rounding("float8", False), empty(1, dtype=torch.float32))):
        float8_numbers(empty(tokens, HIDDEN), rule, scale)


def few_bit_mixtures(tokens: int = 16) -> None:
    """Experts as Qwen3-30B-A3B has them, in four bits, and gpt-oss-20b's as it is published."""
    for number, group, sizes, biased, k in (("int4", 32, (2048, 768), False, 8), ("e2m1", 32, (2880, 2880), True, 4)):
        hidden, inner = sizes
        layers = [
            [PackedLayer(packed(*shape, number, group), empty(shape[0]) if biased else None)] * 32
            for shape in ((2 * inner, hidden), (hidden, inner))
        ]
        table = PackedExpertTable(*layers, hidden, inner, "clamped_swiglu" if biased else "silu", (1.702, 7.0))
        ids, weights = empty(tokens, k, dtype=torch.int32), empty(tokens, k, dtype=torch.float32)
        packed_experts(empty(tokens, hidden), ids, weights, table)


def eight_bit_writes(tokens: int = 16) -> None:
    """The way of Llama 8B's and of Qwen3's keys and values into a cache of eight bits."""
    for kept, normalised in ((torch.float8_e4m3fn, True), (torch.int8, False)):
        q, k, v = (part.view(tokens, -1, 128) for part in empty(tokens, 48 * 128).split([32 * 128, 8 * 128, 8 * 128], -1))
        cache = empty(100, 2, 8, 16, row_size(128, kept), dtype=kept)
        rotary = Rotary(*empty(tokens, 128, dtype=torch.float32).chunk(2, -1))
        norm = QKNorm(empty(128, dtype=torch.float32), empty(128, dtype=torch.float32), 1e-6) if normalised else None
        scales = empty(2, 8, dtype=torch.float32) if kept in FLOATS_OF_EIGHT_BITS else None
        prepare_kv(q, k, v, cache, empty(tokens, dtype=torch.int64), rotary, norm, scales)


LAUNCHES = [norms, gates, few_rows, tables, writes, eight_bit_writes, adapters, mixtures, few_bits, few_bit_mixtures]
