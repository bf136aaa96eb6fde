"""FlashAttention, where it is installed: version 3 (`flash_attn_interface`) on Hopper, else version 2 (`flash_attn`).

An adapter to the signatures of Dao-AILab/flash-attention in August 2026. Neither library can be had where the project's tests
run: it is shown against stand-ins with those signatures, and has never met the libraries themselves.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.attention.backends.interface import (
    AttentionBackend,
    AttentionNeeds,
    StepMetadata,
    below,
    other_cache,
    outside,
    placed,
)
from penstock.engine.runner.device.graphs.descriptor import GraphSupport
from penstock.kernels.paged_attention.device_batch import DeviceBatch

Cache = tuple[torch.Tensor, ...]
"""Keys and values, [blocks, block_size, kv_heads, d] each."""


@dataclass(frozen=True)
class FlashAttentionMetadata:
    """A step as the library takes it."""

    block_table: torch.Tensor
    """[r, max_blocks], int32: the rows of the step."""
    cu_seqlens_k: torch.Tensor | None
    """[r + 1], int32, for version 2."""
    padding: torch.Tensor | None
    """[n, 1, 1], bool: padding tokens. None: there are none, and each request has one query."""


def installed_version() -> int | None:
    """3, 2, or None where neither is installed."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        return 3
    return 2 if importlib.util.find_spec("flash_attn") is not None else None


def version_for(needs: AttentionNeeds) -> int | None:
    """Version 3 is for Hopper; other devices take version 2."""
    version = installed_version()
    if version == 3 and (needs.capability is None or needs.capability[0] != 9):
        return 2 if importlib.util.find_spec("flash_attn") is not None else None
    return version


class FlashAttentionBackend(AttentionBackend):
    """What a graph reads lives in buffers of the largest step's size."""

    name = "flash_attn"

    def __init__(self, needs: AttentionNeeds) -> None:
        super().__init__(needs)
        self._version = version_for(needs)
        self._library: Any = importlib.import_module("flash_attn_interface" if self._version == 3 else "flash_attn")
        self._tokens = torch.arange(needs.max_num_tokens, dtype=torch.int32, device=needs.device)[:, None, None]
        self._tables: dict[int, torch.Tensor] = {}
        self._metadata = StepMetadata(self._build)

    @classmethod
    def refusals(cls, needs: AttentionNeeds) -> list[str]:
        reasons = below(needs, (8, 0))
        version = version_for(needs)
        if version is None:
            reasons.append("neither flash_attn_interface (version 3, for compute capability 9.x) nor flash_attn is installed")
        reasons += outside(needs.dtype, (torch.bfloat16, torch.float16), "dtype")
        reasons += other_cache(needs)
        if needs.head_size > 256 or needs.head_size % 8:
            reasons.append(f"head size {needs.head_size} is no multiple of 8 up to 256")
        # What version 2 checks itself; forks of it allow 16.
        multiple = 256 if version == 2 else 16
        reasons += [f"block size {size} is no multiple of {multiple}" for size in needs.block_sizes if size % multiple]
        if needs.sinks:
            reasons.append("attention sinks are not in its interface")
        if needs.value_size:
            reasons.append("latent attention is not in the calls that are used here")
        return reasons

    @classmethod
    def graph_support(cls, needs: AttentionNeeds) -> GraphSupport:
        return GraphSupport.ALWAYS if version_for(needs) == 3 else GraphSupport.UNIFORM_BATCH

    def _build(self, batch: DeviceBatch) -> FlashAttentionMetadata:
        table = self._table_of(batch)[: batch.num_requests]
        torch.index_select(batch.block_table, 0, batch.rows, out=table)
        if batch.max_query_len == 1 and batch.num_tokens == batch.num_requests:
            return FlashAttentionMetadata(table, None, None)
        cu_seqlens_k = None
        if self._version == 2:
            cu_seqlens_k = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        padding = self._tokens[: batch.num_tokens] >= batch.query_start_loc[-1]
        return FlashAttentionMetadata(table, cu_seqlens_k, padding)

    def _table_of(self, batch: DeviceBatch) -> torch.Tensor:
        """A KV group's, at an address that stays, for the largest step."""
        group = batch.block_table.data_ptr()
        if group not in self._tables:
            shape = (self.needs.max_num_seqs, batch.block_table.shape[1])
            self._tables[group] = torch.zeros(shape, dtype=torch.int32, device=self.needs.device)
        return self._tables[group]

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
        if sinks is not None or value_size or scales is not None:
            raise ValueError("flash_attn has no attention sinks, no latent attention and no scales of keys and values here")
        cache = tuple(kv_cache[:, which].transpose(1, 2) for which in (0, 1))
        common = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if batch.window is None else (batch.window - 1, 0),
            "softcap": softcap,
        }
        step = self._metadata.of(batch, kv_cache)
        found = (self._attend_3 if self._version == 3 else self._attend_2)(q, cache, batch, step, common)
        return placed(found if step.padding is None else found.masked_fill_(step.padding, 0.0), out)

    def _attend_3(
        self, q: torch.Tensor, cache: Cache, batch: DeviceBatch, step: FlashAttentionMetadata, common: dict[str, Any]
    ) -> torch.Tensor:
        return self._library.flash_attn_with_kvcache(
            q,
            *cache,
            cache_seqlens=batch.seq_lens,
            page_table=step.block_table,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            **common,
        )

    def _attend_2(
        self, q: torch.Tensor, cache: Cache, batch: DeviceBatch, step: FlashAttentionMetadata, common: dict[str, Any]
    ) -> torch.Tensor:
        if step.padding is None:
            # The entry that splits keys.
            out = self._library.flash_attn_with_kvcache(
                q[:, None], *cache, cache_seqlens=batch.seq_lens, block_table=step.block_table, **common
            )
            return out[:, 0]
        lengths = (batch.query_start_loc, step.cu_seqlens_k, batch.max_query_len, self.needs.max_model_len)
        return self._library.flash_attn_varlen_func(q, *cache, *lengths, block_table=step.block_table, **common)
