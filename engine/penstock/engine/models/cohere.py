"""Command R (Cohere, 2024) and Command R7B (Cohere 2, 2024): attention and MLP side by side, after one LayerNorm.

In Cohere 2, layers without a window leave positions out; the configuration says so.
"""

from typing import ClassVar

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from penstock.kernels.prepare_kv.reference import Rotary


class CohereDecoderLayer(LlamaDecoderLayer):
    """Attention and MLP of the same normalised input, both added to the residual stream."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm",)

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream, [n, hidden], and nothing beside it, to the same after this layer."""
        normalised = self._norms[0](hidden)
        return hidden + self.self_attn(normalised, rotary, ctx) + self.mlp(normalised), residual


class CohereForCausalLM(LlamaForCausalLM):
    """The Cohere model."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = CohereDecoderLayer
