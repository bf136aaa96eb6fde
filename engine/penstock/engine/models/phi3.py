"""Phi-3, Phi-3.5 and Phi-4-mini (Microsoft, 2024): Llama with fused projections in the checkpoint.

A rotary embedding of a part of the head, and its long form, are in the configuration.
"""

from penstock.engine.models.layers.weight import Weights, fused
from penstock.engine.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """The Phi3 model."""

    def weights(self) -> Weights:
        """Return the tensors of the model by their names in the checkpoint."""
        found = fused(super().weights(), ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        return fused(found, ("gate_proj", "up_proj"), "gate_up_proj")
