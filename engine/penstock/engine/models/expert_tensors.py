"""Checkpoints that hold one tensor for all experts of a layer, gate and up projection together.

Weights in ordinary dtypes have inputs before outputs; in MXFP4 (`_blocks`) it is the other way round, and in some other files.
"""

import re
from collections.abc import Callable

import torch

from penstock.engine.models.layers.weight import Weight, Weights

_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj(?:\.(\w+))?")
_SUFFIXES = {"weight": "", "bias": "_bias", "weight_packed": "_blocks", "weight_scale": "_scales"}
_BLOCK_BYTES = 16
"""Of 32 weights that share a scale."""


def experts_together(weights: Weights, experts: int, *, in_turn: bool, turns: bool = False) -> Weights:
    """The same weights where a tensor holds those of all experts.

    Args:
        weights: Among them those of each expert.
        experts: How many there are on all ranks.
        in_turn: Whether outputs of gate and up projection take turns; else those of the gate come first.
        turns: Whether files may have outputs before inputs; a square tensor is taken for such a one, as transformers takes it.
    """
    found: Weights = {}
    together: dict[tuple[str, str], dict[str, dict[int, Weight]]] = {}
    for name, weight in weights.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            found[name] = weight
        else:
            own = together.setdefault((name_together(name.rpartition(".")[0]), expert[4]), {})
            own.setdefault(expert[3], {})[int(expert[2])] = weight
    for (name, kind), parts in together.items():
        whole = _together(kind, list(parts.values()), experts, in_turn=in_turn, turns=turns)
        found[name + _SUFFIXES[kind]] = whole
    return found


def name_together(module: str) -> str:
    """Returns what such checkpoints call a projection of an expert; any other module keeps its name."""
    found = _EXPERT.fullmatch(module)
    if found is None:
        return module
    return found[1] + ("down_proj" if found[3] == "down" else "gate_up_proj")


def _together(kind: str, parts: list[dict[int, Weight]], experts: int, *, in_turn: bool, turns: bool) -> Weight:
    """The tensor that holds those of all experts.

    Args:
        kind: As the linear method calls each.
        parts: Gate and up projection, or the one that there is: of each expert that the rank has.
        experts: How many there are on all ranks.
        in_turn: As of `experts_together`; `turns` too.
    """
    first = next(iter(parts[0].values()))
    outputs, *inputs = first.shape
    size, outputs = outputs, outputs * len(parts)
    if kind == "weight_packed":
        inputs = [inputs[0] // _BLOCK_BYTES, _BLOCK_BYTES]
    shape = (experts, *inputs, outputs) if kind == "weight" else (experts, outputs, *inputs)
    places = [slice(at, None, len(parts)) if in_turn else slice(at * size, (at + 1) * size) for at in range(len(parts))]
    straight = (outputs, *inputs) if turns else None
    turns = turns and kind == "weight"
    return Weight(shape, _load_each(kind, parts, places, straight), None, first.dtypes, None, turns)


def _load_each(
    kind: str, parts: list[dict[int, Weight]], places: list[slice], straight: tuple[int, ...] | None
) -> Callable[[torch.Tensor], None]:
    def load(value: torch.Tensor) -> None:
        by_output = value.transpose(1, 2) if kind == "weight" and tuple(value.shape[1:]) != straight else value
        for place, experts in zip(places, parts, strict=True):
            for expert, weight in experts.items():
                weight.load(by_output[expert, place].reshape(weight.shape))

    return load
