"""GLM-4 (Zhipu AI, 2024): Llama with one tensor for gate and up projection; the later `Glm4` has norms around each sublayer.

A rotary embedding of half a head, between neighbouring elements, and biases of queries, keys and values are in the configuration.
"""

from typing import ClassVar

from penstock.engine.models.gemma import GemmaDecoderLayer
from penstock.engine.models.layers.weight import Weights, fused
from penstock.engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Glm4DecoderLayer(GemmaDecoderLayer):
    """Gemma's order of norms, under other names."""

    norms: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


class GlmForCausalLM(LlamaForCausalLM):
    """The Glm model."""

    def weights(self) -> Weights:
        """Return the tensors of the model by their names in the checkpoint."""
        return fused(super().weights(), ("gate_proj", "up_proj"), "gate_up_proj")


class Glm4ForCausalLM(GlmForCausalLM):
    """The Glm4 model."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = Glm4DecoderLayer
