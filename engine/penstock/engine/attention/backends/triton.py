"""The project's own kernels: any head size, window, soft cap and sinks, every step in a graph."""

import torch

from penstock.engine.attention.backends.interface import AttentionBackend, AttentionNeeds, below, outside
from penstock.engine.runner.device.graphs.descriptor import GraphSupport
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.latent_launch import sized_latent_workspace
from penstock.kernels.paged_attention.launch import (
    AttentionShape,
    AttentionWorkspace,
    LaunchTable,
    fast_launches,
    invariant_launches,
)
from penstock.kernels.paged_attention.prefix import PrefixWorkspace
from penstock.kernels.paged_attention.triton import paged_attention
from penstock.kernels.prepare_kv.cache_rows import FLOATS_OF_EIGHT_BITS, SCALE_BYTES, SCALED

MAX_HEAD_SIZE = 256


class TritonBackend(AttentionBackend):
    """Args:
    needs: What the layers ask.
    batch_invariant: Whether a request's result must have the same bits whatever else is in a step; see `invariant_launches`.
    """

    name = "triton"

    def __init__(self, needs: AttentionNeeds, *, batch_invariant: bool = False) -> None:
        super().__init__(needs)
        self._table: LaunchTable = invariant_launches if batch_invariant else self.table()
        heads = needs.num_heads, needs.num_kv_heads, needs.head_size
        shape = AttentionShape(*heads, needs.dtype.itemsize, needs.kv_dtype is SCALED)
        # A prefix that is read apart changes bits with the requests beside it.
        self._shares = not (batch_invariant or needs.value_size)
        # The most that a block table can name.
        max_keys = needs.max_blocks * max(needs.block_sizes)
        if needs.value_size:
            self._workspace = sized_latent_workspace(
                *(needs.num_heads, needs.value_size, needs.kv_dtype.itemsize),
                *(needs.max_num_tokens, max_keys, batch_invariant, needs.device),
            )
        else:
            self._workspace = AttentionWorkspace.sized(
                shape, self._table, needs.max_num_seqs, needs.max_num_tokens, max_keys, needs.device
            )
        self._prefix = PrefixWorkspace.sized(shape, needs.max_num_seqs, max_keys, needs.device) if self._shares else None

    @classmethod
    def table(cls) -> LaunchTable:
        """How it launches where results need not be the same in any batch."""
        return fast_launches

    @property
    def shares(self) -> bool:
        return self._shares

    @classmethod
    def refusals(cls, needs: AttentionNeeds) -> list[str]:
        reasons = below(needs, (8, 0))
        reasons += outside(needs.dtype, (torch.bfloat16, torch.float16, torch.float32), "dtype")
        reasons += outside(needs.kv_dtype, (needs.dtype, *FLOATS_OF_EIGHT_BITS, SCALED), "KV cache dtype")
        if needs.kv_dtype is torch.float8_e4m3fn:
            # Triton has no such type for earlier ones.
            reasons += [f"{reason}, for a KV cache of {needs.kv_dtype}" for reason in below(needs, (8, 9)) if not reasons]
        if needs.kv_dtype is SCALED and needs.head_size % SCALE_BYTES:
            reasons.append(f"scales behind {needs.head_size} numbers of a byte are not at multiples of {SCALE_BYTES} bytes")
        if not needs.value_size and (needs.head_size > MAX_HEAD_SIZE or needs.head_size % 8):
            reasons.append(f"head size {needs.head_size} is no multiple of 8 up to {MAX_HEAD_SIZE}")
        reasons += [f"block size {size} is no multiple of 8" for size in needs.block_sizes if size % 8]
        return reasons

    @classmethod
    def graph_support(cls, needs: AttentionNeeds) -> GraphSupport:
        return GraphSupport.ALWAYS

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: DeviceBatch,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        value_size: int = 0,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        options = {
            "table": self._table,
            "workspace": self._workspace,
            "prefix": self._prefix,
            "out": out,
            "value_size": value_size,
            "scales": scales,
        }
        return paged_attention(q, kv_cache, batch, scale, softcap, sinks, **options)
