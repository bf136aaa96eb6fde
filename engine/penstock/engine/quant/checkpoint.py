"""Linear layers of quantized checkpoints: the weight stays packed in memory, and is never held in the model's dtype."""

import logging
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial

import torch

from penstock.engine.config import ConfigError
from penstock.engine.models.expert_tensors import name_together
from penstock.engine.models.layers.linear_method import CPU, LinearMethod, LinearMethodFactory
from penstock.engine.models.layers.projection import FLOATS, LinearLayer, Projection, TensorSpec
from penstock.engine.models.moe import mixtral_name
from penstock.engine.quant.packed import NAME_OF_BIAS, PackedWeight, rows_of
from penstock.engine.quant.scheme import CheckpointQuantization, WeightScheme
from penstock.engine.quant.stored import OF_OUTPUTS, Role, number, stored_tensors
from penstock.kernels.ops import Ops
from penstock.kernels.quantized_linear.reference import pair_up
from penstock.kernels.quantized_linear.rounding import Rounding

log = logging.getLogger(__name__)

BODY = "model."
E4M3_NAN = 0x7F
"""The code of what is no number, without its sign."""


class StoredLinearMethod(PackedWeight):
    """A weight as a quantized checkpoint holds it.

    Each projection of a fused layer keeps its own scales. Inputs that have a static scale take the largest of the projections'.

    Args:
        layer: Whose weight it is.
        scheme: How it is stored.
        ops: The kernels.
        device: Where it lies.
    """

    def __init__(self, layer: LinearLayer, scheme: WeightScheme, ops: Ops, device: torch.device = CPU) -> None:
        asked = scheme.activations
        rounding = None if asked is None else Rounding(asked.number, asked.dynamic, asked.group, asked.power_of_two)
        super().__init__(layer, number(scheme), scheme.group, None, not scheme.symmetric, rounding, ops, device)
        self._scheme = scheme

    def tensors(self, projection: Projection) -> Mapping[str, TensorSpec]:
        """What a checkpoint must hold for a projection, by name: `weight`, and `bias` or scales beside it."""
        found = {name: stored.spec for name, stored in stored_tensors(self._scheme, projection).items()}
        return found | self.bias_of(projection)

    def load(self, projection: Projection, name: str, value: torch.Tensor) -> None:
        """Takes one of these, whole, and keeps the rank's part of it."""
        self.begin()
        if name == NAME_OF_BIAS:
            self.load_bias(projection, value)
            return
        stored, tensor = stored_tensors(self._scheme, projection)[name], f"{self._module(projection)}.{name}"
        if stored.role in ("scales", "input_scale"):
            _check_scales(tensor, stored.decode(value) if value.dtype not in FLOATS else value)
        elif value.dtype is torch.float8_e4m3fn and ((value.view(torch.uint8) & E4M3_NAN) == E4M3_NAN).any():
            raise ConfigError(f"{tensor} holds a value that is not a number")
        elif stored.role == "input_zero" and not -128 <= int(value.flatten()[0]) <= 127:
            raise ConfigError(f"{tensor} is {int(value.flatten()[0])}: a zero point of eight bits is from -128 to 127")
        try:
            value = value.view(stored.spec.shape) if not value.shape else value
            part = stored.decode(value if stored.role == "check" else stored.spec.cut(value, projection))
        except ValueError as error:
            raise ConfigError(f"{tensor} {error}") from None
        ordered = part if stored.role not in OF_OUTPUTS else projection.ordered(part)
        self._keep(stored.role, rows_of(projection), ordered)

    def _keep(self, role: Role, rows: slice, part: torch.Tensor) -> None:
        match role:
            case "values":
                self._pairs[rows].copy_(pair_up(part, self._number))
            case "scales":
                self.keep_scales(rows, part)
            case "zeros":
                assert self._zeros is not None, "the scheme has no zero points"
                self._zeros[rows].copy_(part)
            case "input_scale":
                self.keep_input_scale(part)
            case "input_zero":
                self.keep_input_zero(part)
            case "check":
                pass

    def tie(self, weight: torch.Tensor) -> None:
        """ConfigError: the embedding's weight is not quantized."""
        raise ConfigError(f"{self._layer.name} is quantized, and tie_word_embeddings is set: it has no weight of its own")

    def _module(self, projection: Projection) -> str:
        return self._layer.modules[self._layer.projections.index(projection)]


def _check_scales(tensor: str, scales: torch.Tensor) -> None:
    wide = scales.float()
    for what, wrong in (("not finite", ~wide.isfinite()), ("negative", wide < 0), ("zero", wide == 0)):
        if wrong.any():
            raise ConfigError(f"{tensor} holds a scale that is {what}, at {wrong.nonzero()[0].tolist()}")


def stored(
    plain: LinearMethodFactory, found: CheckpointQuantization, packed: Set[str], ops: Ops, device: torch.device = CPU
) -> LinearMethodFactory:
    """Returns a choice of linear methods by what the checkpoint says of each layer.

    Args:
        plain: Chooses for layers that are not quantized.
        found: What the checkpoint says.
        packed: Modules whose weight it holds in few bits: it may leave others as they were, and say so nowhere.
        ops: The kernels.
        device: Where weights lie.
    """
    log.info("linear layers: weights as the checkpoint packs them (%s)", found.method)
    if ops.linear is None and ops.packed_experts is None:
        log.warning("linear layers: no compiled kernel; torch dequantizes each weight at every step, which is slow")
    return partial(_choose, plain, found, packed, partial(StoredLinearMethod, ops=ops, device=device))


def _choose(
    plain: LinearMethodFactory,
    found: CheckpointQuantization,
    packed: Set[str],
    method: Callable[[LinearLayer, WeightScheme], LinearMethod],
    layer: LinearLayer,
) -> LinearMethod:
    schemes = {module: _scheme(found, packed, module, layer.name) for module in layer.modules}
    if len(set(schemes.values())) > 1:
        each = ", ".join(f"{module.rpartition('.')[2]}: {_said(scheme)}" for module, scheme in schemes.items())
        raise ConfigError(f"{layer.name}: its parts run as one, and their weights are stored differently ({each})")
    scheme = schemes[layer.modules[0]]
    return plain(layer) if scheme is None else method(layer, scheme)


def _scheme(found: CheckpointQuantization, packed: Set[str], *names: str) -> WeightScheme | None:
    """Returns a projection's, by its name or its fused layer's; the checkpoint may leave out what goes before all names."""
    names = (*names, *map(mixtral_name, names), *map(name_together, names))
    names = (*names, *(name.removeprefix(BODY) for name in names))
    return found.scheme(names) if any(name in packed for name in names) else None


def _said(scheme: WeightScheme | None) -> str:
    return "not quantized" if scheme is None else f"{scheme.form}, {scheme.bits} bits, groups of {scheme.group or 'all inputs'}"


def warn_of_ignored(found: CheckpointQuantization, modules: Iterable[str]) -> None:
    """Logs the entries of `ignore` that mean no layer of the model: a name may be misspelt.

    Args:
        found: What the checkpoint says.
        modules: Full names of all projections.
    """
    names = list(modules)
    unused = [entry for entry in found.ignore if not any(found.ignores(entry, [name]) for name in names)]
    if unused:
        log.warning("config.json: quantization_config leaves out what no layer is called: %s", ", ".join(unused))
