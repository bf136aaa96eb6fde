"""What a checkpoint's config.json says of quantized weights. No torch: the frontend reads it too."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.engine.config import ConfigError
from penstock.engine.quant.parse import compressed_tensors, fp8
from penstock.engine.quant.parse.fields import FIELD, refuse
from penstock.engine.quant.parse.four_bits import parse_awq, parse_gptq, parse_mxfp4
from penstock.engine.quant.scheme import CheckpointQuantization

METHODS: Mapping[str, Callable[[Mapping[str, Any]], CheckpointQuantization]] = {
    "awq": parse_awq,
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8.parse,
    "gptq": parse_gptq,
    "mxfp4": parse_mxfp4,
}
"""By `quant_method`."""


def parse_quantization(raw: Mapping[str, Any]) -> CheckpointQuantization | None:
    """Returns how the weights are stored; None: in ordinary dtypes.

    Args:
        raw: Of config.json.

    Raises:
        ConfigError: The method, or a field of it, is not supported; the message names it and what is.
    """
    found = raw.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{FIELD} is {found!r}, not an object")
    parse = METHODS.get(str(found.get("quant_method")))
    if parse is None:
        raise refuse("quant_method", f"is {found.get('quant_method')!r} (supported: {', '.join(METHODS)})")
    return parse(found)
