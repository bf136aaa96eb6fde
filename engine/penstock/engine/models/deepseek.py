"""DeepSeek V2 and V3 (2024), and Kimi K2: mixtures of experts with latent attention.

A token leaves one latent in the cache, from which each head's key and value follow, and one rotated key that all heads share.

    query  [ rotated | not rotated · W_UK ]      a query in the space of latents
    key    [ rotated | latent             ]      what the cache holds
    result Σ weight · latent, then · W_UV

So keys and values are never expanded. Prompts and single tokens take the same form, and with it the same bits.
"""

from typing import Any, ClassVar

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.latent_config import LatentConfig
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.head_linear import HeadLinear
from penstock.engine.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from penstock.engine.models.layers.norm import RMSNorm
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weight, Weights, halves_from_pairs
from penstock.engine.models.llama import LlamaDecoderLayer
from penstock.engine.models.moe import MoeDecoderLayer, MoeForCausalLM
from penstock.kernels.prepare_kv.reference import Rotary

_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says of the others."""


class LatentAttention:
    """Multi-head latent attention. Ranks share the latent, and divide the heads."""

    def __init__(self, config: DecoderConfig, build: Build, index: int) -> None:
        assert config.latent is not None, "the family has latent attention"
        self._latent, self._heads = config.latent, build.shard.span(config.num_heads, "num_attention_heads")
        latent, heads, hidden = self._latent, self._heads, config.hidden_size
        self._query_latent: ColumnParallelLinear | None = None
        name, source = "q_proj", hidden
        if latent.query_rank is not None:
            self._query_latent = _whole("q_a_proj", hidden, latent.query_rank, config.qkv_bias, build)
            self._query_norm = _norm("q_a_layernorm", latent.query_rank, build)
            name, source = "q_b_proj", latent.query_rank
        self._query = ColumnParallelLinear(name, source, {name: heads.times(latent.head_size)}, False, build)
        self._key_value = _whole("kv_a_proj_with_mqa", hidden, latent.rank + latent.rope_size, config.qkv_bias, build)
        self._norm = _norm("kv_a_layernorm", latent.rank, build)
        self._into_latents = HeadLinear(heads.size, latent.nope_size, latent.rank, build)
        self._from_latents = HeadLinear(heads.size, latent.rank, latent.value_size, build)
        self._o_proj = RowParallelLinear("o_proj", heads.times(latent.value_size), hidden, config.o_bias, build)
        self._linears = [self._query, self._key_value, self._o_proj]
        if self._query_latent is not None:
            self._linears.append(self._query_latent)
        self.attention = Attention(
            index=index,
            num_heads=heads.size,
            num_kv_heads=1,
            head_size=latent.key_size,
            scale=config.attention_scale,
            softcap=0.0,
            qk_norm=None,
            value_size=latent.rank,
        )

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        latent, found = self._latent, self._norm.weights()
        for linear in self._linears:
            found |= linear.weights()
        if self._query_latent is not None:
            found |= self._query_norm.weights()
        if latent.interleaved:
            found |= {name: _halves(name, weight, latent) for name, weight in found.items() if weight.part is not None}
        rows = self._heads.total * (latent.nope_size + latent.value_size)
        # No place for an adapter: this weight is multiplied by queries and results, not by the latent.
        return found | {"kv_b_proj.weight": Weight((rows, latent.rank), self._load_expansion)}

    def _load_expansion(self, value: torch.Tensor) -> None:
        """The weight that would expand a latent into each head's key and value, which `HeadLinear`s take in its place."""
        latent = self._latent
        own = self._heads.narrow(value.unflatten(0, (self._heads.total, -1)), 0)
        keys, values = own.split([latent.nope_size, latent.value_size], 1)
        self._into_latents.weight.copy_(keys.transpose(1, 2))
        self._from_latents.weight.copy_(values)

    def finish(self) -> None:
        """After loading."""
        for layer in (*self._linears, self._into_latents, self._from_latents):
            layer.finish()

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, ctx: AttentionContext) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        latent = self._latent
        source = hidden if self._query_latent is None else self._query_norm(self._query_latent(hidden))
        heads = self._query(source).view(len(hidden), self._heads.size, latent.head_size)
        plain, rotated = heads.split([latent.nope_size, latent.rope_size], -1)
        query = torch.cat((rotated, self._into_latents(plain)), -1).flatten(1)
        compressed, shared = self._key_value(hidden).split([latent.rank, latent.rope_size], -1)
        normed = self._norm(compressed)
        found = ctx.attend(self.attention, query, torch.cat((shared, normed), -1), normed, rotary)
        found = found.view(len(hidden), self._heads.size, latent.rank)
        return self._o_proj(self._from_latents(found).flatten(1))


def _whole(name: str, inputs: int, outputs: int, bias: bool, build: Build) -> ColumnParallelLinear:
    """A projection that every rank has whole."""
    return ColumnParallelLinear(name, inputs, {name: Span(outputs, 0, outputs)}, bias, build)


def _norm(name: str, size: int, build: Build) -> RMSNorm:
    return RMSNorm(name, size, _EPS, build.ops, device=build.device)


def _halves(name: str, weight: Weight, latent: LatentConfig) -> Weight:
    """Of a projection that gives what rotates, at the end of each head or of the latent."""
    if name.startswith(("q_proj.", "q_b_proj.")):
        return halves_from_pairs(name, weight, latent.head_size, latent.rope_size, latent.nope_size)
    if name.startswith("kv_a_proj_with_mqa."):
        return halves_from_pairs(name, weight, latent.rank + latent.rope_size, latent.rope_size, latent.rank)
    return weight


class DeepseekDecoderLayer(MoeDecoderLayer):
    """See LlamaDecoderLayer."""

    attention: ClassVar[Any] = LatentAttention


class DeepseekForCausalLM(MoeForCausalLM):
    """See LlamaForCausalLM."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = DeepseekDecoderLayer
