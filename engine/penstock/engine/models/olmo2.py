"""OLMo 2 (OLMo team, 2024): a sublayer's output is normalised instead of its input, and so are all queries and keys together."""

from typing import Any, ClassVar

import torch

from penstock.engine.attention.context import ForwardContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, make_norm
from penstock.kernels.prepare_kv.reference import Rotary


class Olmo2Attention(LlamaAttention):
    """Norms over the whole projections, before they are cut into heads."""

    def __init__(self, config: DecoderConfig, build: Build, index: int) -> None:
        super().__init__(config, build, index)
        if build.shard.world > 1:
            raise ValueError("OLMo 2's norms over all heads cannot be divided among ranks")
        q_size, k_size, _ = self.qkv_proj.sizes
        self.norms = [make_norm("q_norm", q_size, config, build), make_norm("k_norm", k_size, config, build)]

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, ctx: ForwardContext) -> torch.Tensor:
        """See LlamaAttention."""
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        q_norm, k_norm = self.norms
        return self.o_proj(ctx.attend(self.attention, q_norm(q), k_norm(k), v, rotary))


class Olmo2DecoderLayer(LlamaDecoderLayer):
    """Attention and MLP of the residual stream as it is, each normalised after and added to it."""

    attention: ClassVar[type[LlamaAttention]] = Olmo2Attention
    norms: ClassVar[tuple[str, ...]] = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream, [n, hidden], and nothing beside it, to the same after this layer."""
        after_attention, after_mlp = self._norms
        hidden = hidden + after_attention(self.self_attn(hidden, rotary, ctx))
        return hidden + after_mlp(self.mlp(hidden)), residual


class Olmo2ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    decoder_layer: ClassVar[type[Any]] = Olmo2DecoderLayer
