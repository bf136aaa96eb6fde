"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, a sink in every softmax, windows in every other layer.

The checkpoint holds one tensor for all experts of a layer, with the outputs of gate and up projection in turn. Weights in
ordinary dtypes have inputs before outputs; in MXFP4 (`_blocks`) it is the other way round.
"""

import re
from collections.abc import Callable

import torch

from penstock.engine.models.layers.weight import Weight, Weights
from penstock.engine.models.moe import MoeForCausalLM

_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj(?:\.(\w+))?")
_SUFFIXES = {"weight": "", "bias": "_bias", "weight_packed": "_blocks", "weight_scale": "_scales"}
_BLOCK_BYTES = 16
"""Of 32 weights that share a scale."""


class GptOssForCausalLM(MoeForCausalLM):
    """The GptOss model."""

    def weights(self) -> Weights:
        """Return the tensors of the model by their names in the checkpoint."""
        found: Weights = {}
        together: dict[tuple[str, str], dict[str, dict[int, Weight]]] = {}
        for name, weight in super().weights().items():
            expert = _EXPERT.fullmatch(name)
            if expert is None:
                found[name.replace(".mlp.gate.", ".mlp.router.")] = weight
            else:
                own = together.setdefault((gpt_oss_name(name.rpartition(".")[0]), expert[4]), {})
                own.setdefault(expert[3], {})[int(expert[2])] = weight
        assert self.config.experts is not None
        for (name, kind), parts in together.items():
            found[name + _SUFFIXES[kind]] = _together(kind, list(parts.values()), self.config.experts.count)
        return found


def gpt_oss_name(module: str) -> str:
    """Returns what gpt-oss's checkpoints call a projection of an expert; any other module keeps its name."""
    found = _EXPERT.fullmatch(module)
    if found is None:
        return module
    return found[1] + ("down_proj" if found[3] == "down" else "gate_up_proj")


def _together(kind: str, parts: list[dict[int, Weight]], experts: int) -> Weight:
    """The tensor that holds those of all experts.

    Args:
        kind: As the linear method calls each.
        parts: Gate and up projection, or the one that there is: of each expert that the rank has.
        experts: How many there are on all ranks.
    """
    first = next(iter(parts[0].values()))
    outputs, *inputs = first.shape
    outputs *= len(parts)
    if kind == "weight_packed":
        inputs = [inputs[0] // _BLOCK_BYTES, _BLOCK_BYTES]
    shape = (experts, *inputs, outputs) if kind == "weight" else (experts, outputs, *inputs)
    return Weight(shape, _load_each(kind, parts), None, first.dtypes, None)


def _load_each(kind: str, parts: list[dict[int, Weight]]) -> Callable[[torch.Tensor], None]:
    def load(value: torch.Tensor) -> None:
        by_output = value.transpose(1, 2) if kind == "weight" else value
        for at, experts in enumerate(parts):
            for expert, weight in experts.items():
                weight.load(by_output[expert, at :: len(parts)].reshape(weight.shape))

    return load
