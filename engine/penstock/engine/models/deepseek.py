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
from penstock.engine.models.layers.linear import ColumnParallelLinear, RowParallelLinear, stored_weights
from penstock.engine.models.layers.linear_method import PackedMethod
from penstock.engine.models.layers.norm import RMSNorm
from penstock.engine.models.layers.projection import LinearLayer, Projection, RotatedPairs
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weight, Weights
from penstock.engine.models.llama import LlamaDecoderLayer
from penstock.engine.models.moe import MoeDecoderLayer, MoeForCausalLM
from penstock.kernels.prepare_kv.reference import Rotary

EXPANSION = "kv_b_proj"
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
        in_queries, in_latents = _pairs(latent)
        outputs = {name: heads.times(latent.head_size)}
        self._query = ColumnParallelLinear(name, source, outputs, False, build, {name: in_queries} if in_queries else None)
        size = latent.rank + latent.rope_size
        self._key_value = _whole("kv_a_proj_with_mqa", hidden, size, config.qkv_bias, build, in_latents)
        self._norm = _norm("kv_a_layernorm", latent.rank, build)
        self._expansion = _PackedExpansion.of(heads.times(latent.nope_size + latent.value_size), latent.rank, build)
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
        found = self._norm.weights()
        for linear in self._linears:
            found |= linear.weights()
        if self._query_latent is not None:
            found |= self._query_norm.weights()
        if self._expansion is not None:
            return found | self._expansion.weights()
        latent = self._latent
        outputs = self._heads.times(latent.nope_size + latent.value_size)
        # No place for an adapter: this weight is multiplied by queries and results, not by the latent.
        weight = Weight((outputs.total, latent.rank), lambda value: self._take_apart(outputs.narrow(value, 0)))
        return found | {f"{EXPANSION}.weight": weight}

    def _take_apart(self, expansion: torch.Tensor) -> None:
        """Gives the `HeadLinear`s the weight that would expand a latent into the key and value of each of the rank's heads."""
        latent = self._latent
        own = expansion.unflatten(0, (self._heads.size, -1))
        keys, values = own.split([latent.nope_size, latent.value_size], 1)
        self._into_latents.weight.copy_(keys.transpose(1, 2))
        self._from_latents.weight.copy_(values)

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        if self._expansion is not None:
            self._take_apart(self._expansion.widened())
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


class _PackedExpansion:
    """`kv_b_proj` of a checkpoint that holds it in few bits.

    Queries meet one half of it from the other side, so that its groups of inputs are not theirs: it is widened after loading.

    Args:
        projection: See Projection.
        method: That knows the stored form.
    """

    def __init__(self, projection: Projection, method: PackedMethod) -> None:
        self._projection, self._method = projection, method

    @classmethod
    def of(cls, outputs: Span, rank: int, build: Build) -> "_PackedExpansion | None":
        """Returns None where the checkpoint holds the weight in an ordinary dtype."""
        projection = Projection(EXPANSION, Span(rank, 0, rank), outputs, 0)
        method = build.linear_method(LinearLayer(build.name(EXPANSION), (projection,), False, build.dtype, bare=True))
        return cls(projection, method) if isinstance(method, PackedMethod) else None

    def weights(self) -> Weights:
        """What the checkpoint must have, with no place for adapters."""
        return stored_weights(self._method, self._projection)

    def widened(self) -> torch.Tensor:
        """After loading: the rank's part, [outputs, rank] in the model's dtype. The packed one is dropped."""
        return self._method.widened()


def _whole(
    name: str, inputs: int, outputs: int, bias: bool, build: Build, pairs: RotatedPairs | None = None
) -> ColumnParallelLinear:
    """A projection that every rank has whole."""
    return ColumnParallelLinear(name, inputs, {name: Span(outputs, 0, outputs)}, bias, build, {name: pairs} if pairs else None)


def _norm(name: str, size: int, build: Build) -> RMSNorm:
    return RMSNorm(name, size, _EPS, build.ops, device=build.device)


def _pairs(latent: LatentConfig) -> tuple[RotatedPairs | None, RotatedPairs | None]:
    """What rotates at the end of each head of a query, and at the end of what a token's latent comes from."""
    if not latent.interleaved:
        return None, None
    in_queries = RotatedPairs(latent.head_size, latent.rope_size, latent.nope_size)
    return in_queries, RotatedPairs(latent.rank + latent.rope_size, latent.rope_size, latent.rank)


class DeepseekDecoderLayer(MoeDecoderLayer):
    """The Deepseek decoder layer."""

    attention: ClassVar[Any] = LatentAttention


class DeepseekForCausalLM(MoeForCausalLM):
    """The Deepseek model."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = DeepseekDecoderLayer
