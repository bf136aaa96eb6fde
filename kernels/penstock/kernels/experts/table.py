"""The weights of a layer's experts, as fused kernels find them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from penstock.kernels.integer_linear.reference import IntegerWeight
from penstock.kernels.quantized_linear.reference import NUMBERS, SCALES, QuantizedWeight
from penstock.kernels.quantized_linear.rounding import Rounding

Gate = Literal["silu", "gelu_tanh", "clamped_swiglu"]
_INTEGERS = len(NUMBERS)
"""In place of a number's, where weights and inputs meet as whole numbers."""


class AddressTable(ABC):
    """Holds addresses of tensors, which are others once a device's memory was given back."""

    @abstractmethod
    def find(self) -> None:
        """Takes the addresses anew."""


@dataclass
class ExpertTable(AddressTable):
    """Where each expert's weights lie. They are tensors of their own: no second copy, and each is loaded when its turn comes."""

    gate_up: Sequence[torch.Tensor]
    """By expert, as the form's linear kernel wants a weight [2 · inner, hidden]."""
    down: Sequence[torch.Tensor]
    """By expert, [hidden, inner]."""
    hidden: int
    inner: int
    gate: Gate
    clamp: tuple[float, float] = (0.0, 0.0)
    """Slope and limit of a clamped gate."""
    biases: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None
    """By expert, those of both layers; None: there are none."""
    gate_up_at: torch.Tensor = field(init=False)
    """[experts], int64: the addresses."""
    down_at: torch.Tensor = field(init=False)
    biases_at: tuple[torch.Tensor, torch.Tensor] | None = field(init=False)

    def __post_init__(self) -> None:
        self.find()

    def find(self) -> None:
        """Takes the addresses anew."""
        self.gate_up_at, self.down_at = _addresses(self.gate_up), _addresses(self.down)
        self.biases_at = None if self.biases is None else (_addresses(self.biases[0]), _addresses(self.biases[1]))


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(tensors[0].device)


class PackedLayer(NamedTuple):
    """One linear layer of one expert, in few bits."""

    weight: QuantizedWeight | IntegerWeight
    bias: torch.Tensor | None = None
    rounding: Rounding | None = None
    """Of its inputs; None: they are multiplied as they are."""
    input_scale: torch.Tensor | None = None
    """[1] float32, of a rounding that is not dynamic."""
    input_zero: torch.Tensor | None = None
    """The same, of one that is not symmetric."""

    @property
    def form(self) -> tuple[int, ...]:
        """What all experts must have in common, in the compiled kernel's numbers."""
        weight, rule = self.weight, self.rounding
        how = (0, 0, 0, 0) if rule is None else (1, rule.group or 0, rule.number == "float8", rule.power_of_two)
        if isinstance(weight, IntegerWeight):
            return _INTEGERS, SCALES[weight.scales.dtype], weight.group, *map(int, how)
        return NUMBERS.index(weight.number), SCALES[weight.scales.dtype], weight.group, *map(int, how)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What each expert has of its own, in the compiled kernel's order."""
        weight = self.weight
        sums = weight.sums if isinstance(weight, IntegerWeight) else None
        return weight.values, weight.scales, weight.zeros, self.bias, self.input_scale, self.input_zero, sums


@dataclass
class PackedExpertTable(AddressTable):
    """Where each expert's weights of few bits lie. The experts of a layer have one form; `alike` says whether they do."""

    gate_up: Sequence[PackedLayer]
    """By expert, [2 · inner, hidden]."""
    down: Sequence[PackedLayer]
    """By expert, [hidden, inner]."""
    hidden: int
    inner: int
    gate: Gate
    clamp: tuple[float, float] = (0.0, 0.0)
    """Slope and limit of a clamped gate."""
    forms: torch.Tensor = field(init=False)
    """[2, 7], int64: of both layers."""
    gate_up_at: torch.Tensor = field(init=False)
    """[experts, 7], int64: the addresses; 0 for what there is not."""
    down_at: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.forms = torch.tensor([self.gate_up[0].form, self.down[0].form])
        self.find()

    def find(self) -> None:
        """Takes the addresses anew."""
        device = self.gate_up[0].weight.values.device
        self.gate_up_at, self.down_at = (
            torch.tensor([[0 if tensor is None else tensor.data_ptr() for tensor in one.tensors] for one in layers]).to(device)
            for layers in (self.gate_up, self.down)
        )


def alike(layers: Sequence[PackedLayer]) -> bool:
    """Whether one kernel takes the same layer of all experts."""
    return len({layer.form for layer in layers}) == 1
