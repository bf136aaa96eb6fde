"""Gemma 1 and 2 (Gemma team, 2024) and Gemma 3's text models (2025).

Norms stand before and after each sublayer; embeddings are scaled. Windows, soft caps, normalised queries and keys, and a rotary
embedding of its own for layers with a window are in the configuration.
"""

from typing import ClassVar

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from penstock.kernels.prepare_kv.reference import Rotary


class GemmaDecoderLayer(LlamaDecoderLayer):
    """Attention and MLP, each normalised before and after, then added to the residual stream."""

    norms: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last output and the residual stream (none in the first layer), [n, hidden] each, to the same after this layer."""
        before_attention, after_attention, before_mlp, after_mlp = self._norms
        if residual is None:
            hidden, residual = before_attention(hidden), hidden
        else:
            hidden, residual = before_attention.add(hidden, residual)
        hidden = after_attention(self.self_attn(hidden, rotary, ctx))
        hidden, residual = before_mlp.add(hidden, residual)
        return after_mlp(self.mlp(hidden)), residual


class GemmaForCausalLM(LlamaForCausalLM):
    """The Gemma model."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = GemmaDecoderLayer

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        super().__init__(config, build)
        # Rounded to the model's dtype, as it was in training.
        self._embed_scale = float(torch.tensor(config.hidden_size**0.5, dtype=build.dtype))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, hidden]."""
        return super().embed(input_ids) * self._embed_scale

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, vocab]: in the model's dtype, which samplers widen, or in float32 where they are scaled."""
        logits, cap = super().compute_logits(hidden), self.config.logits_softcap
        return (logits.float() / cap).tanh_().mul_(cap) if cap else logits


class Gemma1ForCausalLM(GemmaForCausalLM):
    """The first Gemma (2024): Llama's layers between Gemma's ends."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer
