"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, a sink in every softmax, windows in every other layer.

The checkpoint holds one tensor for all experts of a layer, inputs before outputs, gate and up projection in turn.
"""

import re
from collections.abc import Callable

import torch

from penstock.engine.models.layers.weight import Weight, Weights
from penstock.engine.models.moe import MoeForCausalLM

_EXPERT = re.compile(r"(.+\.experts)\.0\.gate_proj\.weight")


class GptOssForCausalLM(MoeForCausalLM):
    """See LlamaForCausalLM."""

    def weights(self) -> Weights:
        """See LlamaForCausalLM."""
        found = {name.replace(".mlp.gate.", ".mlp.router."): weight for name, weight in super().weights().items()}
        for layer in [match[1] for name in found if (match := _EXPERT.fullmatch(name))]:
            own = {name: found.pop(name) for name in list(found) if name.startswith(f"{layer}.")}
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                gates, ups, downs = (
                    [weight for name, weight in own.items() if name.endswith(f".{part}.{kind}")]
                    for part in ("gate_proj", "up_proj", "down_proj")
                )
                found[f"{layer}.gate_up_proj{suffix}"] = _together(gates, ups)
                found[f"{layer}.down_proj{suffix}"] = _together(downs)
        return found


def _together(*parts: list[Weight]) -> Weight:
    """The tensor that holds those of all experts.

    Args:
        parts: By expert each. An output of the first is followed by the same output of the next.
    """
    outputs, *inputs = parts[0][0].shape
    shape = (len(parts[0]), *inputs, outputs * len(parts))
    return Weight(shape, _load_each(parts), None, parts[0][0].dtypes, len(shape) - 1)


def _load_each(parts: tuple[list[Weight], ...]) -> Callable[[torch.Tensor], None]:
    def load(value: torch.Tensor) -> None:
        for at, experts in enumerate(parts):
            for weight, tensor in zip(experts, value[..., at :: len(parts)], strict=True):
                weight.load(tensor.T if tensor.dim() == 2 else tensor)

    return load
