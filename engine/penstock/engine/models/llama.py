"""Llama (Touvron et al., 2023), versions 2 and 3, and what is built like it: Mistral, Qwen2, Qwen3.

What these add (biases, normalised queries and keys, windows) is in the configuration; other families replace parts.
"""

import re
from collections import deque
from collections.abc import Iterator
from typing import ClassVar, Protocol

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import Activation, DecoderConfig
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.few_rows import FewRows
from penstock.engine.models.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from penstock.engine.models.layers.norm import LayerNorm, Norm, RMSNorm
from penstock.engine.models.layers.projection import RotatedPairs
from penstock.engine.models.layers.rotary import RotaryEmbedding
from penstock.engine.models.layers.vocab import LMHead, VocabEmbedding
from penstock.engine.models.layers.weight import Weight, Weights, prefixed
from penstock.engine.models.model import AuxStates, Carry
from penstock.kernels.prepare_kv.reference import QKNorm, Rotary

KV_SCALE = re.compile(
    r"\.(?:(?:self_)?attn\.(?:[kvq]_scale|kv_scale|(?:qkv_proj\.)?[kv]_scale)|[kv]_proj\.(?:[kv]_scale|output_scale))$"
)
"""Scales of a quantized KV cache, under all names that checkpoints have for them."""


class LlamaAttention:
    """Grouped-query attention."""

    def __init__(self, config: DecoderConfig, build: Build, index: int) -> None:
        heads, kv_heads = (config.num_heads, config.num_kv_heads), build.shard.kv_heads(config.num_kv_heads)
        own = build.shard.span(config.num_heads, "num_attention_heads")
        pairs = RotatedPairs(config.head_size, config.ropes[index].size) if config.interleaved_rope else None
        self.qkv_proj = QKVParallelLinear(config.hidden_size, *heads, config.head_size, config.qkv_bias, build, pairs)
        self.o_proj = RowParallelLinear("o_proj", own.times(config.head_size), config.hidden_size, config.o_bias, build)
        norms = ("q_norm", "k_norm")
        self.norms = [make_norm(name, config.head_size, config, build) for name in norms if config.qk_norm]
        self.attention = Attention(
            index=index,
            num_heads=own.size,
            num_kv_heads=kv_heads.size,
            head_size=config.head_size,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            qk_norm=QKNorm(self.norms[0].weight, self.norms[1].weight, config.rms_norm_eps) if config.qk_norm else None,
            sinks=torch.empty(own.size, dtype=torch.float32, device=build.device) if config.sinks else None,
        )
        self._heads = own

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        found = self.qkv_proj.weights() | self.o_proj.weights()
        for norm in self.norms:
            found |= norm.weights()
        if self.attention.sinks is not None:
            found["sinks"] = Weight((self._heads.total,), self._load_sinks)
        return found

    def _load_sinks(self, value: torch.Tensor) -> None:
        assert self.attention.sinks is not None
        self.attention.sinks.copy_(self._heads.narrow(value, 0))

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self.qkv_proj.finish()
        self.o_proj.finish()

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, ctx: AttentionContext) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        return self.o_proj(self.attend(self.qkv_proj(hidden), rotary, ctx))

    def attend(self, qkv: torch.Tensor, rotary: Rotary, ctx: AttentionContext) -> torch.Tensor:
        """[n, the projections' outputs] → [n, heads · head_size]."""
        q, k, v = qkv.split(self.qkv_proj.sizes, dim=-1)
        return ctx.attend(self.attention, q, k, v, rotary)


class MLP(Protocol):
    """What stands behind the attention of a layer."""

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        ...

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        ...

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        ...


class LlamaMLP:
    """Gated MLP."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = GateUpParallelLinear(hidden, inner, bias, build)
        self.down_proj = RowParallelLinear("down_proj", build.shard.span(inner, "intermediate_size"), hidden, bias, build)
        self.activation: Activation = config.activation
        self._gated_mul = {"silu": build.ops.silu_mul, "gelu_tanh": build.ops.gelu_tanh_mul}[config.activation]

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        return self.gate_up_proj.weights() | self.down_proj.weights()

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self.gate_up_proj.finish()
        self.down_proj.finish()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        return self.down_proj(self._gated_mul(self.gate_up_proj(hidden)))

    def partial(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]: the rank's part of a sum over the ranks."""
        return self.down_proj.partial(self._gated_mul(self.gate_up_proj(hidden)))


class LlamaDecoderLayer:
    """Attention and MLP, each normalised before and added to the residual stream after."""

    attention: ClassVar[type[LlamaAttention]] = LlamaAttention
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """In the order of their use."""

    def __init__(self, config: DecoderConfig, build: Build, index: int) -> None:
        self._norms = [make_norm(name, config.hidden_size, config, build) for name in self.norms]
        self.self_attn = self.attention(config, build.within("self_attn"), index)
        self.mlp = self.make_mlp(config, build.within("mlp"), index)
        self._few = self._of_few_rows(build)

    def _of_few_rows(self, build: Build) -> tuple[FewRows, FewRows] | None:
        """The two halves of the layer for few tokens on a device; None: there are no such forms."""
        attention, mlp = self.self_attn, self.mlp
        if type(self).__call__ is not LlamaDecoderLayer.__call__:  # the layer has another order, and never runs them
            return None
        if not self._is_whole or not isinstance(mlp, LlamaMLP):
            return None
        first = FewRows.of(build.ops, self._norms[0], attention.qkv_proj, attention.o_proj, build.comm)
        second = FewRows.of(build.ops, self._norms[1], mlp.gate_up_proj, mlp.down_proj, build.comm)
        return None if first is None or second is None else (first, second)

    def make_mlp(self, config: DecoderConfig, build: Build, index: int) -> MLP:
        """The MLP of layer `index`: families whose layers differ choose here."""
        return LlamaMLP(config, build)

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        found = prefixed("self_attn", self.self_attn.weights()) | prefixed("mlp", self.mlp.weights())
        for norm in self._norms:
            found |= norm.weights()
        return found

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self.self_attn.finish()
        self.mlp.finish()

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last output and the residual stream (none in the first layer), [n, hidden] each, to the same after this layer."""
        if self._few is not None and FewRows.serve(hidden) and self._is_whole:
            return self._few_rows(hidden if residual is None else hidden + residual, rotary, ctx), None
        before_attention, before_mlp = self._norms
        if residual is None:
            hidden, residual = before_attention(hidden), hidden
        else:
            hidden, residual = before_attention.add(hidden, residual)
        hidden = self.self_attn(hidden, rotary, ctx)
        hidden, residual = before_mlp.add(hidden, residual)
        return self.mlp(hidden), residual

    @property
    def _is_whole(self) -> bool:
        """Whether nothing wraps a part, as a profile does, which then has a name of its own."""
        return type(self.self_attn) is LlamaAttention and type(self.mlp) is LlamaMLP

    def _few_rows(self, stream: torch.Tensor, rotary: Rotary, ctx: AttentionContext) -> torch.Tensor:
        """The residual stream, [n, hidden], before and after the layer."""
        assert self._few is not None and isinstance(self.mlp, LlamaMLP)
        attention, mlp = self._few
        stream = attention.leave(self.self_attn.attend(attention.enter(stream), rotary, ctx), stream)
        return mlp.leave(mlp.enter_gated(stream, self.mlp.activation), stream)


class LlamaForCausalLM:
    """Embedding, decoder layers, final norm and LM head; see `Model`. A pipeline stage has some of them."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        self.config, self._stage = config, build.stage
        ropes, body = list(dict.fromkeys(config.ropes)), build.within("model")
        self._rotaries = [RotaryEmbedding(rope, build.max_model_len, build.ops, build.device) for rope in ropes]
        self._rotary_of = [ropes.index(rope) for rope in config.ropes]
        self._indices = range(config.num_layers) if build.layers is None else build.layers
        has_head = build.lm_head and build.stage.last
        embeds = build.stage.first or build.embedding or (has_head and config.tie_word_embeddings)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, build) if embeds else None
        self.layers = [self.decoder_layer(config, body.within(f"layers.{at}"), at) for at in self._indices]
        self.norm = make_norm("norm", config.hidden_size, config, build)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, build) if has_head else None

    def weights(self) -> Weights:
        """Every tensor that the checkpoint must have, by name."""
        tied = self.config.tie_word_embeddings
        found: Weights = {} if self.embed_tokens is None else self.embed_tokens.weights()
        for index, layer in zip(self._indices, self.layers, strict=True):
            found |= prefixed(f"layers.{index}", layer.weights())
        if self._stage.last:
            found |= self.norm.weights()
        found = prefixed("model", found)
        return found if self.lm_head is None or tied else found | self.lm_head.weights()

    def ignores(self, name: str) -> bool:
        """Angles that we compute, the copy of a tied weight, an LM head that nobody asks, MTP layers, what other stages have, and
        scales of keys and values, which `read_kv_scales` reads where the KV cache needs them."""
        unused = self.lm_head is None or self.config.tie_word_embeddings
        if name.endswith(".rotary_emb.inv_freq") or KV_SCALE.search(name) or (name == "lm_head.weight" and unused):
            return True
        layer, last = re.match(r"model\.layers\.(\d+)\.", name), self.config.num_layers
        if layer is not None and last <= int(layer[1]) < last + self.config.further_layers:
            return True
        if self._stage.world == 1:
            return False
        if layer is not None:
            return int(layer[1]) < last and int(layer[1]) not in self._indices
        return name == "model.embed_tokens.weight" or name.startswith("model.norm.")

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for layer in self.layers:
            layer.finish()
        if self.lm_head is None:
            return
        if self.config.tie_word_embeddings:
            assert self.embed_tokens is not None
            self.lm_head.tie(self.embed_tokens)
        self.lm_head.finish()

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        carry: Carry | None = None,
        aux: AuxStates | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, of the last stage."""
        return self._normalised(self.advance(inputs, positions, ctx, carry, aux))

    def advance(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        carry: Carry | None = None,
        aux: AuxStates | None = None,
    ) -> Carry:
        """The same up to the stage's last layer: what the next stage begins with."""
        return deque(self._carries(inputs, positions, ctx, carry, aux), maxlen=1)[0][1]

    def states(
        self, inputs: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext, carry: Carry | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What `forward` computes, part by part: the name of each and its output, [n, hidden]; the last is the final norm."""
        for name, carry in self._carries(inputs, positions, ctx, carry, None):  # noqa: B020 (what the first part begins with)
            yield name, carry.hidden
        assert carry is not None
        yield "norm", self._normalised(carry)

    def _carries(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        carry: Carry | None,
        aux: AuxStates | None,
    ) -> Iterator[tuple[str, Carry]]:
        """What each part passes on, by the part's name."""
        if carry is None:
            carry = self._entered(inputs)
            yield "embed_tokens", carry
        angles = [rotary(positions) for rotary in self._rotaries]
        for index, layer in zip(self._indices, self.layers, strict=True):
            if aux is not None and index in aux:
                aux[index] = carry.stream()
            hidden, residual = layer(carry.hidden, carry.residual, angles[self._rotary_of[index]], ctx)
            if carry.deep:
                hidden = hidden + carry.deep[0]
            carry = Carry(hidden, residual, carry.deep[1:])
            yield f"layers.{index}", carry

    def _entered(self, inputs: torch.Tensor) -> Carry:
        if not inputs.is_floating_point():
            return Carry(self.embed(inputs), None)
        hidden, *deep = inputs.split(self.config.hidden_size, dim=-1)
        return Carry(hidden.contiguous(), None, tuple(deep))

    def _normalised(self, carry: Carry) -> torch.Tensor:
        hidden, residual = carry.hidden, carry.residual
        return self.norm(hidden) if residual is None else self.norm.add(hidden, residual)[0]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, hidden]."""
        assert self.embed_tokens is not None, "a pipeline stage without an embedding begins with what another one has carried"
        return self.embed_tokens(input_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, vocab]: in the model's dtype, which samplers widen, or in float32 where they are scaled."""
        assert self.lm_head is not None, "a model without an LM head has no logits"
        logits, scale = self.lm_head(hidden), self.config.logits_scale
        return logits if scale == 1.0 else logits.float() * scale


def make_norm(name: str, size: int, config: DecoderConfig, build: Build) -> Norm:
    """A norm as all of a model's are."""
    if config.norm != "rms":
        return LayerNorm(name, size, config.rms_norm_eps, config.norm == "layer_bias", build.device)
    return RMSNorm(name, size, config.rms_norm_eps, build.ops, config.norm_offset, build.device)
