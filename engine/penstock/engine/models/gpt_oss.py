"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, a sink in every softmax, windows in every other layer.

The checkpoint holds one tensor for all experts of a layer, with the outputs of gate and up projection in turn.
"""

from penstock.engine.models.expert_tensors import experts_together
from penstock.engine.models.layers.weight import Weights
from penstock.engine.models.moe import MoeForCausalLM


class GptOssForCausalLM(MoeForCausalLM):
    """The GptOss model."""

    def weights(self) -> Weights:
        """Return the tensors of the model by their names in the checkpoint."""
        assert self.config.experts is not None
        found = experts_together(super().weights(), self.config.experts.count, in_turn=True)
        return {name.replace(".mlp.gate.", ".mlp.router."): weight for name, weight in found.items()}
