"""What a step's forward pass carries besides tokens: where each request's keys and values lie. Passed on explicitly."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.models.layers.attention import Attention
from penstock.kernels.ops import Ops
from penstock.kernels.paged_attention.batch import PagedBatch
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.prepare_kv.reference import Rotary


@dataclass(frozen=True)
class GroupInputs:
    """Where the layers of one KV group read and write a step's n tokens."""

    slot_mapping: torch.Tensor
    """[n], int64: block · block_size + offset; -1: the token is padding, and goes nowhere."""
    batch: PagedBatch | DeviceBatch

    def seeing(self, ends: npt.NDArray[np.int32]) -> "GroupInputs":
        """The same where tokens see others after them; `ends` is `PagedBatch.ends`."""
        assert isinstance(self.batch, PagedBatch), "on a CPU alone"
        return replace(self, batch=replace(self.batch, ends=ends))


class AttentionContext(Protocol):
    """What a model's layers know of a step; all cache traffic passes through `attend`."""

    def attend(self, layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary, /) -> torch.Tensor:
        """Writes the step's keys and values, then attends."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """One step's `AttentionContext`."""

    ops: Ops
    kv_caches: list[torch.Tensor]
    """Per layer, [blocks, 2, kv_heads, block_size, row]; of latent attention, [blocks, 1, 1, block_size, row]. A row holds
    `head_size` numbers; see `penstock.kernels.prepare_kv.cache_rows`."""
    layer_groups: list[GroupInputs]
    """Per layer, its group's."""
    kv_scales: Sequence[torch.Tensor] | None = field(default=None, kw_only=True)
    """Per layer, [2, kv_heads] float32: what its cache holds is a key or value divided by its head's scale. None: by nothing."""

    def attend(
        self,
        layer: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the step's keys and values, then attends.

        Args:
            layer: Whose cache.
            q: [n, heads · head_size].
            k: [n, kv_heads · head_size].
            v: [n, kv_heads · head_size]; of latent attention [n, value_size], which is a part of `k` as well.
            rotary: The angles of the n tokens.
            out: As the result, contiguous: where it goes, on a device. None: into new memory.

        Returns:
            [n, heads · head_size]; of latent attention [n, heads · value_size].
        """
        q = q.view(-1, layer.num_heads, layer.head_size)
        k = k.view(-1, layer.num_kv_heads, layer.head_size)
        values = None if layer.value_size else v.view(k.shape)
        cache, group = self.kv_caches[layer.index], self.layer_groups[layer.index]
        options: dict[str, Any] = {} if self.kv_scales is None else {"scales": self.kv_scales[layer.index]}
        # The write comes first: a token attends to itself and to its chunk's earlier tokens through the cache.
        q = self.ops.prepare_kv(q, k, values, cache, group.slot_mapping, rotary, layer.qk_norm, **options)
        if out is not None:
            options["out"] = out.view(len(q), layer.num_heads, -1)
        if layer.value_size:
            options["value_size"] = layer.value_size
        return self.ops.paged_attention(q, cache, group.batch, layer.scale, layer.softcap, layer.sinks, **options).flatten(1)
