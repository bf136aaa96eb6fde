"""Granite 3 (IBM, 2024): Llama with factors for embeddings, attention, sublayers and logits."""

from typing import ClassVar

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from penstock.kernels.prepare_kv.reference import Rotary


class GraniteDecoderLayer(LlamaDecoderLayer):
    """Each sublayer's output is scaled before it is added to the residual stream."""

    def __init__(self, config: DecoderConfig, build: Build, index: int) -> None:
        super().__init__(config, build, index)
        self._scale = config.residual_scale

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last output and the residual stream (none in the first layer), [n, hidden] each, to the same after this layer."""
        before_attention, before_mlp = self._norms
        if residual is None:
            hidden, residual = before_attention(hidden), hidden
        else:
            hidden, residual = before_attention.add(hidden, residual)
        hidden, residual = before_mlp.add(self.self_attn(hidden, rotary, ctx) * self._scale, residual)
        return self.mlp(hidden) * self._scale, residual


class GraniteForCausalLM(LlamaForCausalLM):
    """The Granite model."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = GraniteDecoderLayer

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, hidden]."""
        return super().embed(input_ids) * self.config.embedding_scale
