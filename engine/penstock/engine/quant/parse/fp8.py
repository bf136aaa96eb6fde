"""`quant_method: fp8`, as DeepSeek's checkpoints have it, and vLLM's older ones."""

from collections.abc import Mapping
from typing import Any

from penstock.engine.quant.parse.compressed_tensors import BLOCK
from penstock.engine.quant.parse.fields import choice, names, refuse
from penstock.engine.quant.scheme import ActivationScheme, CheckpointQuantization, Rule, WeightScheme


def parse(raw: Mapping[str, Any]) -> CheckpointQuantization:
    """Returns what it says; ConfigError names the field that cannot be served."""
    choice(raw, "fmt", ("e4m3",), "e4m3")
    dynamic = choice(raw, "activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    block = raw.get("weight_block_size")
    if block is not None and (block != BLOCK or not dynamic):
        raise refuse("weight_block_size", f"is {block!r} (supported: {BLOCK} with dynamic activations, or none)")
    powers = choice(raw, "scale_fmt", (None, "ue8m0")) == "ue8m0"
    size = None if block is None else BLOCK[1]
    scheme = WeightScheme(
        form="float-quantized",
        bits=8,
        group=size,
        outputs=size,
        scale="weight_scale" if block is None else "weight_scale_inv",
        activations=ActivationScheme(number="float8", dynamic=dynamic, group=size, power_of_two=powers),
    )
    ignore = names(raw, "ignored_layers") + names(raw, "modules_to_not_convert")
    return CheckpointQuantization(method="fp8", rules=(Rule(("Linear",), scheme),), ignore=ignore)
