"""OLMo 2 (OLMo team, 2024): a sublayer's output is normalised instead of its input, and so are all queries and keys together.

OLMo 3 adds windows. EXAONE 4 (LG AI Research, 2025) has the same layers with norms of each head.
"""

from typing import ClassVar

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, make_norm
from penstock.kernels.prepare_kv.reference import Rotary


class Olmo2Attention(LlamaAttention):
    """Norms over the whole projections, before they are cut into heads."""

    def __init__(self, config: DecoderConfig, build: Build, index: int) -> None:
        super().__init__(config, build, index)
        self._comm, self._replicas = build.comm, build.shard.replicas(config.num_kv_heads)
        q, k, _ = self.qkv_proj.layer.projections
        self._spans = [q.outputs, k.outputs]
        self.norms = [make_norm("q_norm", q.outputs.total, config, build), make_norm("k_norm", k.outputs.total, config, build)]

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, ctx: AttentionContext) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        q, k = (self._normalised(at, x, replicas) for at, (x, replicas) in enumerate(((q, 1), (k, self._replicas))))
        return self.o_proj(ctx.attend(self.attention, q, k, v, rotary))

    def _normalised(self, at: int, x: torch.Tensor, replicas: int) -> torch.Tensor:
        """The rank's part of all heads' norm. Each head is on so many ranks."""
        span, whole = self._spans[at], self._comm.all_gather(x)
        if replicas > 1:
            whole = whole.view(len(x), -1, span.size)[:, ::replicas].flatten(1)
        found = self.norms[at](whole)
        return found if span.size == span.total else span.narrow(found, 1).contiguous()


class Olmo2DecoderLayer(LlamaDecoderLayer):
    """Attention and MLP of the residual stream as it is, each normalised after and added to it."""

    attention: ClassVar[type[LlamaAttention]] = Olmo2Attention
    norms: ClassVar[tuple[str, ...]] = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream, [n, hidden], and nothing beside it, to the same after this layer."""
        after_attention, after_mlp = self._norms
        hidden = hidden + after_attention(self.self_attn(hidden, rotary, ctx))
        return hidden + after_mlp(self.mlp(hidden)), residual


class Olmo2ForCausalLM(LlamaForCausalLM):
    """The Olmo2 model."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = Olmo2DecoderLayer


class Exaone4DecoderLayer(Olmo2DecoderLayer):
    """With norms of each head's queries and keys."""

    attention: ClassVar[type[LlamaAttention]] = LlamaAttention


class Exaone4ForCausalLM(LlamaForCausalLM):
    """The Exaone4 model."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = Exaone4DecoderLayer
