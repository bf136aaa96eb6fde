"""How weights are stored in few bits. Light to import: `penstock --help` and the frontend read it."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

QuantizationName = Literal[
    "int8_per_channel_weight_only", "int8_per_group_32", "int4_per_group_32", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"
]
"""How weights are quantized while they are loaded; see `docs/engine/quantization.md`."""
StoredMethod = Literal["awq", "compressed-tensors", "fp8", "gptq", "mxfp4"]
"""`quant_method` of checkpoints that are quantized already."""
StoredForm = Literal["pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized", "awq", "gptq"]
"""Which tensors a checkpoint holds for a weight; the formats of compressed-tensors by their own names."""
SCALE_BYTES = 2
"""Of a scale in most checkpoints: an estimate of costs needs no more."""


class ActivationScheme(msgspec.Struct, frozen=True, kw_only=True):
    """How a linear layer's inputs are rounded before they are multiplied."""

    number: Literal["int8", "float8"]
    dynamic: bool
    """Whether each token has scales of its own; else the checkpoint holds one for the layer."""
    group: int | None = None
    """Inputs of a token that share a scale; None: all."""
    symmetric: bool = True
    power_of_two: bool = False
    """Whether a dynamic scale is the next power of two, as DeepSeek V3.1 has it (`scale_fmt: ue8m0`)."""


class WeightScheme(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint stores the weight of a linear layer."""

    form: StoredForm
    bits: Literal[4, 8]
    group: int | None = None
    """Inputs that share a scale; None: all."""
    outputs: int | None = 1
    """Outputs that share a scale; None: all."""
    symmetric: bool = True
    """Whether there are no zero points."""
    scale: str = "weight_scale"
    """Name of the scales' tensor."""
    zeros_less_one: bool = False
    """Whether zero points are stored less 1, as GPTQ's first format has them."""
    activations: ActivationScheme | None = None
    """None: they keep the model's dtype."""

    @property
    def weight_bytes(self) -> float:
        """Of one weight with its share of a group's scale."""
        return self.bits / 8 + (0 if self.group is None else SCALE_BYTES / self.group)


class Rule(msgspec.Struct, frozen=True):
    """A scheme, and whose it is."""

    targets: tuple[str, ...]
    """Modules' names, `re:` and a pattern from a name's beginning, or `Linear`: all that no other rule names."""
    scheme: WeightScheme


class CheckpointQuantization(msgspec.Struct, frozen=True, kw_only=True):
    """What `quantization_config` of a checkpoint says of each linear layer."""

    method: StoredMethod
    """`quant_method`."""
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = ()
    """Modules that keep the model's dtype."""
    ignore_anywhere: bool = False
    """Whether a module is ignored that has one of them anywhere in its name."""

    def scheme(self, names: Sequence[str]) -> WeightScheme | None:
        """Returns how a projection's weight is stored; None: in the model's dtype.

        Args:
            names: By which a checkpoint may call the projection: its full name, or that of the fused layer that it is a part of.
        """
        if any(self.ignores(entry, names) for entry in self.ignore):
            return None
        for rule in self.rules:
            if any(_names(target, names) for target in rule.targets if target != "Linear"):
                return rule.scheme
        return next((rule.scheme for rule in self.rules if "Linear" in rule.targets), None)

    def ignores(self, entry: str, names: Iterable[str]) -> bool:
        """Whether an entry of `ignore` means a module with one of these names."""
        if self.ignore_anywhere:
            return any(entry in name for name in names)
        return any(_names(entry, (name,)) or name.startswith(f"{entry}.") or name.endswith(f".{entry}") for name in names)

    @property
    def weight_bytes(self) -> float:
        """Of one weight, by the first rule."""
        return self.rules[0].scheme.weight_bytes


def _names(target: str, names: Iterable[str]) -> bool:
    """Whether a name is the target or fits its pattern."""
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in names)
    return target in names
