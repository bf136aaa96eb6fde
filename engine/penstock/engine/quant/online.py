"""Weights that are quantized while they are loaded: what `--quantization` names."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from penstock.engine.config import ConfigError
from penstock.engine.models.layers.linear_method import CPU, LinearMethod, LinearMethodFactory
from penstock.engine.models.layers.projection import Axis, LinearLayer, Projection, TensorSpec
from penstock.engine.quant.packed import NAME_OF_BIAS, PackedWeight, rows_of
from penstock.engine.quant.scheme import QuantizationName
from penstock.kernels.ops import Ops
from penstock.kernels.quantized_linear.reference import Quantizable, pair_up, quantize
from penstock.kernels.quantized_linear.rounding import Rounding

log = logging.getLogger(__name__)

KEPT = ("lm_head", "gate", "shared_expert_gate", "kv_b_proj")
"""Layers that keep the model's dtype, as with other engines. The LM head decides the tokens directly and may share the weight of
the embedding; routers decide which experts a token gets; latent attention takes `kv_b_proj` apart."""


class Scheme(NamedTuple):
    """How a weight is stored, and what becomes of the inputs that it is multiplied by."""

    number: Quantizable
    group: int | None
    """Inputs that share a scale; None: all inputs of an output."""
    scale_dtype: torch.dtype
    outputs: int | None = 1
    """Outputs of a projection that share a scale; None: all."""
    rounding: Rounding | None = None
    """Of the inputs; None: they keep the model's dtype."""


SCHEMES: Mapping[QuantizationName, Scheme] = {
    "int8_per_channel_weight_only": Scheme("int8", None, torch.float32),
    "int8_per_group_32": Scheme("int8", 32, torch.bfloat16),
    "int4_per_group_32": Scheme("int4", 32, torch.bfloat16),
    "fp8_per_tensor": Scheme("e4m3", None, torch.float32, None, Rounding("float8", dynamic=True)),
    "fp8_per_channel": Scheme("e4m3", None, torch.float32, 1, Rounding("float8", dynamic=True)),
    "fp8_per_block": Scheme("e4m3", 128, torch.float32, 128, Rounding("float8", dynamic=True, group=128)),
}
"""The last three do what checkpoints in FP8 with dynamic scales of activations do."""


class QuantizedLinearMethod(PackedWeight):
    """A weight of few bits with scales.

    Each projection is quantized whole and then cut, so that ranks hold the same numbers as one process does.

    Args:
        layer: Whose weight it is.
        scheme: How it is stored.
        ops: The kernels.
        device: Where it lies.
    """

    def __init__(self, layer: LinearLayer, scheme: Scheme, ops: Ops, device: torch.device = CPU) -> None:
        inputs, group = layer.projections[0].inputs, scheme.group or 1
        for what, count in (("begins at", inputs.start), ("ends at", inputs.stop % inputs.total)):
            if count % group:
                raise ConfigError(
                    f"--quantization: a rank's part of {layer.name} {what} input {count} of {inputs.total}, no multiple of a "
                    f"group's {group}"
                )
        super().__init__(layer, scheme.number, scheme.group, scheme.scale_dtype, False, scheme.rounding, ops, device)
        self._scheme = scheme

    def tensors(self, projection: Projection) -> Mapping[str, TensorSpec]:
        """What a checkpoint must hold for a projection, by name: `weight`, and `bias` or scales beside it."""
        return {"weight": TensorSpec(projection.shape, outputs=Axis(0), inputs=Axis(1))} | self.bias_of(projection)

    def load(self, projection: Projection, name: str, value: torch.Tensor) -> None:
        """Takes one of these, whole, and keeps the rank's part of it."""
        self.begin()
        if name == NAME_OF_BIAS:
            self.load_bias(projection, value)
            return
        scheme, spec = self._scheme, self.tensors(projection)[name]
        values, scales = quantize(value, scheme.number, scheme.group or value.shape[1], scheme.scale_dtype, scheme.outputs)
        if not scales.isfinite().all():
            raise ConfigError(f"--quantization: {self._layer.name}: {projection.name}.weight holds a value that is not finite")
        part = projection.ordered(spec.cut(values, projection))
        self._pairs[rows_of(projection)].copy_(pair_up(part, scheme.number))
        groups = Axis(1, scheme.group) if scheme.group else None
        spec = TensorSpec(tuple(scales.shape), outputs=Axis(0), inputs=groups)
        self.keep_scales(rows_of(projection), projection.ordered(spec.cut(scales, projection)))

    def tie(self, weight: torch.Tensor) -> None:
        """No layer that may be tied is quantized."""
        raise NotImplementedError(f"{self._layer.name} cannot share another layer's weight")


def quantized(
    plain: LinearMethodFactory, name: QuantizationName | None, ops: Ops, threads: int, device: torch.device = CPU
) -> LinearMethodFactory:
    """The same choice of linear methods, with quantized weights in all layers but the LM head and routers.

    Args:
        plain: Chooses for layers that keep the model's dtype.
        name: The scheme; None: no layer is quantized.
        ops: The kernels.
        threads: Of the model on a CPU, where quantized layers use one.
        device: Where weights lie.
    """
    if name is None:
        return plain
    log.info("linear layers: weights quantized while loading, %s; lm_head and routers keep their dtype", name)
    if ops.linear is None and ops.packed_experts is None:
        log.warning("linear layers: no compiled kernel; torch dequantizes each weight at every step, which is slow")
    elif threads > 1 and device.type == "cpu":
        log.warning("linear layers: quantized weights are multiplied in one thread instead of %d", threads)
    scheme = partial(QuantizedLinearMethod, scheme=SCHEMES[name], ops=ops, device=device)

    def choose(layer: LinearLayer) -> LinearMethod:
        return plain(layer) if layer.name.rpartition(".")[2] in KEPT else scheme(layer)

    return choose
