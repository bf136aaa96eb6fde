"""StarCoder 2 (BigCode, 2024): LayerNorm, biases, and an MLP without a gate."""

from typing import ClassVar

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from penstock.engine.models.layers.weight import Weights
from penstock.engine.models.llama import MLP, LlamaDecoderLayer, LlamaForCausalLM


class Starcoder2MLP:
    """Two projections with GELU between them."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        hidden, bias = config.hidden_size, config.mlp_bias
        inner = build.shard.span(config.intermediate_size, "intermediate_size")
        self.c_fc = ColumnParallelLinear("c_fc", hidden, {"c_fc": inner}, bias, build)
        self.c_proj = RowParallelLinear("c_proj", inner, hidden, bias, build)
        self._gated_mul = build.ops.gelu_tanh_mul

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        return self.c_fc.weights() | self.c_proj.weights()

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self.c_fc.finish()
        self.c_proj.finish()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        inner = self.c_fc(hidden)
        # torch's own GELU computes the last elements of a tensor by other code: a token's bits would depend on its batch.
        return self.c_proj(self._gated_mul(torch.cat((inner, torch.ones_like(inner)), dim=-1)))


class Starcoder2DecoderLayer(LlamaDecoderLayer):
    """The Starcoder2 decoder layer."""

    def make_mlp(self, config: DecoderConfig, build: Build, index: int) -> MLP:
        """The MLP of layer `index`: families whose layers differ choose here."""
        return Starcoder2MLP(config, build)


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """The Starcoder2 model."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = Starcoder2DecoderLayer
