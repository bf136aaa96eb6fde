"""The compiled operations as torch functions; the references document arguments and results."""

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.kernels.collective.native import SIGNATURES, NativeCollectives
from penstock.kernels.cpu.tape import Listener, Pool, Recording, Tape, Watch
from penstock.kernels.experts.routing import Routing
from penstock.kernels.experts.table import ExpertTable, PackedExpertTable
from penstock.kernels.head_linear.reference import HeadWeight
from penstock.kernels.integer_linear.reference import IntegerWeight
from penstock.kernels.linear.reference import pack_weight
from penstock.kernels.lora.batch import LoraBatch
from penstock.kernels.lora.packed import PackedLoraShelves
from penstock.kernels.paged_attention.batch import PagedBatch
from penstock.kernels.prepare_kv.cache_rows import FLOATS_OF_EIGHT_BITS, SCALED, row_size
from penstock.kernels.prepare_kv.reference import QKNorm, Rotary
from penstock.kernels.quantized_linear.reference import NUMBERS, SCALES, QuantizedWeight
from penstock.kernels.quantized_linear.rounding import Rounding

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_GATES = ("silu", "gelu_tanh", "clamped_swiglu")
"""As the compiled kernel of experts numbers them."""
_CACHES = (
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    *((dtype, kept) for kept in (*FLOATS_OF_EIGHT_BITS, SCALED) for dtype in DTYPES),
)
_WITH_CACHE = {pair: number for number, pair in enumerate(_CACHES)}
"""The compiled kernels' numbers for the dtypes of a model and its KV cache."""

_SIGNATURES = {
    "penstock_rms_norm": [c_int, *[c_void_p] * 3, *[c_int64] * 2, c_float],
    "penstock_add_rms_norm": [c_int, *[c_void_p] * 5, *[c_int64] * 2, c_float],
    "penstock_silu_mul": [c_int, *[c_void_p] * 2, *[c_int64] * 2],
    "penstock_gelu_tanh_mul": [c_int, *[c_void_p] * 2, *[c_int64] * 2],
    "penstock_prepare_kv": [
        *[c_int, *[c_void_p] * 3, *[c_int64] * 3, *[c_void_p] * 2, c_int64],
        *[*[c_void_p] * 3, c_int64, *[c_void_p] * 3, c_float, *[c_int64] * 6],
    ],
    "penstock_linear": [c_int, *[c_void_p] * 4, *[c_int64] * 3],
    "penstock_paged_attention": [c_int, *[c_void_p] * 3, c_int64, *[c_void_p] * 6, *[c_int64] * 8, *[c_float] * 2],
    "penstock_gather_rows": [*[c_void_p] * 3, *[c_int64] * 2],
    "penstock_add_lora": [
        *[c_int, *[c_void_p] * 4, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p],
        *[c_int64] * 2,
    ],
    "penstock_route": [c_int, *[c_void_p] * 4, *[c_int64] * 3, *[c_int] * 2, *[c_int64] * 3, c_float],
    "penstock_experts": [c_int, *[c_void_p] * 8, *[c_int64] * 5, c_int, *[c_float] * 2],
    **SIGNATURES,
    "penstock_quantized_linear": [*[c_int] * 3, *[c_void_p] * 6, *[c_int64] * 4],
    "penstock_clamped_swiglu": [c_int, *[c_void_p] * 2, *[c_int64] * 2, *[c_float] * 2],
    "penstock_head_linear": [c_int, c_void_p, *[c_int64] * 2, c_void_p, c_int64, c_void_p, *[c_int64] * 4],
    "penstock_rounded_inputs": [c_int, *[c_void_p] * 4, *[c_int64] * 3, *[c_int] * 2],
    "penstock_packed_experts": [c_int, *[c_void_p] * 7, *[c_int64] * 5, c_int, *[c_float] * 2],
    "penstock_integer_linear": [c_int, *[c_void_p] * 9, *[c_int64] * 5, c_int],
    "penstock_replay": [c_void_p, c_int64],
}
_NUMBERS = tuple(_SIGNATURES)
"""The operations in the order in which `replay.cpp` numbers them."""
_UNTAPED = {"penstock_combine_experts": [c_int, *[c_void_p] * 4, *[c_int64] * 3]}
"""Operations whose sizes follow from the values of a step, so that no tape takes them down."""


class NativeOps:
    """Of one dtype; tensors of another are an error of the caller.

    Args:
        library: What `build.library` returned.
        dtype: One of DTYPES.
    """

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        loaded = ctypes.CDLL(str(library))
        for name, arguments in (_SIGNATURES | _UNTAPED).items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, None
        self._library: Any = loaded
        self.collectives = NativeCollectives(loaded)
        self._dtype, self._code = dtype, DTYPES[dtype]

    def tape(self, run: Callable[[], torch.Tensor], pool: Pool) -> Tape:
        """Runs a function of these operations and torch's, and takes down what it does; see `penstock.kernels.cpu.tape`.

        Args:
            run: Whose tensors and arrays from outside stay where they are as long as the tape is used.
            pool: Where intermediate tensors lie, of this tape and of others.

        Raises:
            NotTapeable: It does something that could not be done again.
        """
        library, recording = self._library, Recording(self._library.penstock_replay)
        self._library = self.collectives.library = Listener(library, _NUMBERS, recording)
        try:
            with Watch(recording, pool, _NUMBERS.index("penstock_gather_rows")):
                return recording.tape(pool.alias(run()))
        finally:
            self._library = self.collectives.library = library

    def linear(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
        """See the reference."""
        x = self._checked(x)
        rows, in_features = x.shape
        out = torch.empty((rows, out_features), dtype=self._dtype)
        bias_pointer = None if bias is None else bias.data_ptr()
        pointers = (x.data_ptr(), packed.data_ptr(), bias_pointer, out.data_ptr())
        self._library.penstock_linear(self._code, *pointers, rows, out_features, in_features)
        return out

    def quantized_linear(self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """See the reference."""
        x = self._checked(x)
        if x.shape[1] != weight.in_features:
            raise ValueError(f"{x.shape[1]} inputs meet a weight of {weight.in_features}")
        out = torch.empty((x.shape[0], weight.out_features), dtype=self._dtype)
        bias_pointer = None if bias is None else bias.data_ptr()
        zeros_pointer = None if weight.zeros is None else weight.zeros.data_ptr()
        pointers = (x.data_ptr(), weight.values.data_ptr(), weight.scales.data_ptr(), zeros_pointer, bias_pointer, out.data_ptr())
        sizes = (x.shape[0], weight.out_features, weight.in_features, weight.group)
        codes = (self._code, SCALES[weight.scales.dtype], NUMBERS.index(weight.number))
        self._library.penstock_quantized_linear(*codes, *pointers, *sizes)
        return out

    def integer_linear(
        self,
        x: torch.Tensor,
        weight: IntegerWeight,
        rule: Rounding,
        scale: torch.Tensor | None,
        zero: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See the reference."""
        _check_scale(rule, scale)
        x = self._checked(x)
        if x.shape[1] != weight.in_features:
            raise ValueError(f"{x.shape[1]} inputs meet a weight of {weight.in_features}")
        out = torch.empty((x.shape[0], weight.out_features), dtype=self._dtype)
        tensors = (x, weight.values, weight.scales, weight.sums, weight.zeros, bias, scale, zero, out)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        sizes = (x.shape[0], weight.out_features, weight.in_features, weight.group, rule.group or 0)
        self._library.penstock_integer_linear(self._code, *pointers, *sizes, int(rule.power_of_two))
        return out

    def rounded_inputs(
        self, x: torch.Tensor, rule: Rounding, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the reference."""
        _check_scale(rule, scale)
        x = self._checked(x)
        out = torch.empty_like(x)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (x, scale, zero, out))
        codes = (rule.number == "float8", rule.power_of_two)
        self._library.penstock_rounded_inputs(self._code, *pointers, *x.shape, rule.group or 0, *map(int, codes))
        return out

    @staticmethod
    def pack_heads(weight: torch.Tensor) -> HeadWeight:
        """[heads, out, in], each head's for the kernel of linear layers."""
        return HeadWeight(torch.stack([pack_weight(own) for own in weight]), weight.shape[1])

    def head_linear(self, x: torch.Tensor, weight: HeadWeight) -> torch.Tensor:
        """See the reference."""
        if x.dtype != self._dtype or weight.tensor.dtype != self._dtype:
            raise TypeError(f"these operations are for {self._dtype}, not {x.dtype} and {weight.tensor.dtype}")
        x = x if x.stride(2) == 1 else x.contiguous()
        out = torch.empty((x.shape[0], x.shape[1], weight.out_features), dtype=self._dtype)
        weights = (weight.tensor.data_ptr(), weight.tensor.stride(0) * weight.tensor.element_size(), out.data_ptr())
        sizes = (x.shape[0], x.shape[1], weight.out_features, x.shape[2])
        self._library.penstock_head_linear(self._code, x.data_ptr(), x.stride(0), x.stride(1), *weights, *sizes)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See the reference."""
        x = self._checked(x)
        out = torch.empty_like(x)
        size = x.shape[-1]
        pointers = (x.data_ptr(), _norm_weight(weight).data_ptr(), out.data_ptr())
        self._library.penstock_rms_norm(self._code, *pointers, x.numel() // size, size, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the reference."""
        x, residual = self._checked(x), self._checked(residual)
        out, total = torch.empty_like(x), torch.empty_like(x)
        pointers = (tensor.data_ptr() for tensor in (x, residual, _norm_weight(weight), out, total))
        self._library.penstock_add_rms_norm(self._code, *pointers, x.shape[0], x.shape[1], eps)
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See the reference."""
        return self._gated_mul(self._library.penstock_silu_mul, gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See the reference."""
        return self._gated_mul(self._library.penstock_gelu_tanh_mul, gate_up)

    def clamped_swiglu(self, gate_up: torch.Tensor, slope: float, limit: float) -> torch.Tensor:
        """See the reference."""
        return self._gated_mul(self._library.penstock_clamped_swiglu, gate_up, slope, limit)

    def _gated_mul(self, function: Callable[..., None], gate_up: torch.Tensor, *constants: float) -> torch.Tensor:
        gate_up = self._checked(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        function(self._code, gate_up.data_ptr(), out.data_ptr(), rows, size, *constants)
        return out

    def prepare_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        rotary: Rotary,
        qk_norm: QKNorm | None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the reference."""
        # Slices of one projection's result: rows may lie apart, a row's heads side by side.
        q, k = (x if _has_rows(x) else x.contiguous() for x in (q, k))
        v = v if v is None or _has_rows(v) else v.contiguous()
        out = torch.empty(q.shape, dtype=self._dtype)
        code, block_stride, kv_heads, block_size = self._cache_layout(kv_cache, q.shape[2])
        weights = (
            (None, None) if qk_norm is None else tuple(_norm_weight(x).data_ptr() for x in (qk_norm.q_weight, qk_norm.k_weight))
        )
        self._library.penstock_prepare_kv(
            *(code, q.data_ptr(), k.data_ptr(), None if v is None else v.data_ptr()),
            *(q.stride(0), k.stride(0), 0 if v is None else v.stride(0)),
            *(out.data_ptr(), kv_cache.data_ptr(), block_stride, slot_mapping.data_ptr()),
            *(
                rotary.cos.data_ptr(),
                rotary.sin.data_ptr(),
                rotary.cos.stride(0),
                *weights,
                _scales_of(kv_cache, scales),
                0.0 if qk_norm is None else qk_norm.eps,
            ),
            *(q.shape[0], q.shape[1], kv_heads, block_size, q.shape[2], 2 * rotary.cos.shape[1]),
        )
        return out

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        value_size: int = 0,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the reference."""
        q = self._checked(q)
        out = torch.empty((q.shape[0], q.shape[1], value_size or q.shape[2]), dtype=self._dtype)
        code, block_stride, kv_heads, block_size = self._cache_layout(kv_cache, q.shape[2])
        starts, lens, table = np.ascontiguousarray(batch.query_start_loc), np.ascontiguousarray(batch.seq_lens), batch.block_table
        if table.strides[1] != table.itemsize:
            raise ValueError("a row's blocks must lie side by side")
        self._library.penstock_paged_attention(
            *(code, q.data_ptr(), out.data_ptr(), kv_cache.data_ptr(), block_stride),
            *(starts.ctypes.data, lens.ctypes.data, table.ctypes.data, None if sinks is None else sinks.data_ptr()),
            *(None if batch.ends is None else batch.ends.ctypes.data, _scales_of(kv_cache, scales)),
            *(table.strides[0] // table.itemsize, len(lens), q.shape[1], kv_heads, block_size, q.shape[2]),
            *(batch.window or 0, value_size, scale, softcap),
        )
        return out

    def route(self, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """See the reference; logits are float32 or of the operations' dtype."""
        logits = logits.contiguous()
        tokens, experts = logits.shape
        ids = torch.empty((tokens, routing.top_k), dtype=torch.int32)
        weights = torch.empty((tokens, routing.top_k), dtype=torch.float32)
        pointers = (logits.data_ptr(), None if bias is None else bias.data_ptr(), ids.data_ptr(), weights.data_ptr())
        self._library.penstock_route(
            *(DTYPES[logits.dtype], *pointers, tokens, experts, routing.top_k, int(routing.sigmoid), int(routing.renormalise)),
            *(routing.groups, routing.top_groups, routing.group_best, routing.scale),
        )
        return ids, weights

    def experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, table: ExpertTable) -> torch.Tensor:
        """See the reference, of whose MLPs the table holds the packed weights; `ids` are those of experts in it."""
        x = self._checked(x)
        out = torch.empty_like(x)
        addresses = (table.gate_up_at, table.down_at, *(table.biases_at or (None, None)))
        tensors = (x, ids.contiguous(), weights.contiguous(), *addresses, out)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        sizes = (*ids.shape, len(table.gate_up), table.hidden, table.inner)
        self._library.penstock_experts(self._code, *pointers, *sizes, _GATES.index(table.gate), *table.clamp)
        return out

    def combine_experts(self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum of each token's results by weight; see `experts.reference.combine_rows`."""
        results, (tokens, choices) = self._checked(results), places.shape
        out = torch.empty((tokens, results.shape[1]), dtype=self._dtype)
        pointers = (tensor.data_ptr() for tensor in (results, places.contiguous(), weights.contiguous(), out))
        self._library.penstock_combine_experts(self._code, *pointers, tokens, choices, results.shape[1])
        return out

    def packed_experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, table: PackedExpertTable) -> torch.Tensor:
        """See the reference, of whose MLPs the table holds the weights in few bits; `ids` are those of experts in it."""
        x = self._checked(x)
        out = torch.empty_like(x)
        tensors = (x, ids.contiguous(), weights.contiguous(), table.forms, table.gate_up_at, table.down_at, out)
        pointers = (tensor.data_ptr() for tensor in tensors)
        sizes = (*ids.shape, len(table.gate_up), table.hidden, table.inner)
        self._library.penstock_packed_experts(self._code, *pointers, *sizes, _GATES.index(table.gate), *table.clamp)
        return out

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, shelves: PackedLoraShelves, batch: LoraBatch) -> None:
        """See the reference; what is between the two products is rounded to the dtype, and `y` is in one piece."""
        x = self._checked(x)
        if y.dtype != self._dtype or not y.is_contiguous():
            raise TypeError(f"outputs must be {self._dtype} and in one piece")
        pointers = (y.data_ptr(), x.data_ptr())
        self._library.penstock_add_lora(self._code, *pointers, *batch.layout, *shelves.layout, y.shape[1])

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._dtype:
            raise TypeError(f"these operations are for {self._dtype}, not {x.dtype}")
        return x.contiguous()

    def _cache_layout(self, kv_cache: torch.Tensor, head_size: int) -> tuple[int, int, int, int]:
        """Number of the two dtypes, elements between blocks, key heads, tokens a block; a block's own elements must lie side by
        side."""
        code = _WITH_CACHE.get((self._dtype, kv_cache.dtype))
        if code is None or not kv_cache[0].is_contiguous():
            raise TypeError(
                f"a cache of {kv_cache.dtype} has no compiled form for {self._dtype}, or its blocks are not in one piece"
            )
        if kv_cache.shape[4] != row_size(head_size, kv_cache.dtype):
            raise ValueError(f"a cache with rows of {kv_cache.shape[4]} meets heads of {head_size}")
        return code, kv_cache.stride(0), kv_cache.shape[2], kv_cache.shape[3]


def _check_scale(rule: Rounding, scale: torch.Tensor | None) -> None:
    if rule.dynamic != (scale is None):
        raise ValueError("dynamic scales are found here, others are given")


def _scales_of(kv_cache: torch.Tensor, scales: torch.Tensor | None) -> int | None:
    """The address of a cache's scales; TypeError where there cannot be such."""
    if scales is None:
        return None
    fits = scales.dtype is torch.float32 and scales.shape == (2, kv_cache.shape[2]) and scales.is_contiguous()
    if kv_cache.dtype not in FLOATS_OF_EIGHT_BITS or not fits:
        raise TypeError(f"scales of {scales.dtype}, {list(scales.shape)}, do not fit a cache of {kv_cache.dtype}")
    return scales.data_ptr()


def _has_rows(x: torch.Tensor) -> bool:
    """Whether a token's heads lie side by side."""
    return x.stride()[1:] == (x.shape[2], 1)


def _norm_weight(weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype != torch.float32:
        raise TypeError(f"the weight of a norm is float32 whatever the model's dtype, not {weight.dtype}")
    return weight.contiguous()
