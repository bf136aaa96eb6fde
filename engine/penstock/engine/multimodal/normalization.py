"""From 8-bit channels to what a tower was trained on."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.engine.config import ConfigError
from penstock.engine.multimodal.settings import Normalization

FILE: Final = "preprocessor_config.json"


def normalized(pixels: npt.NDArray[np.uint8], by: Normalization) -> npt.NDArray[np.float32]:
    """[height, width, 3] → the same in float32."""
    scaled = (pixels.astype(np.float64) * by.factor).astype(np.float32)
    return (scaled - np.asarray(by.mean, np.float32)) / np.asarray(by.std, np.float32)


def read_normalization(raw: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> Normalization:
    """Reads the object of `FILE`; `ConfigError` names a field that makes no sense.

    Args:
        raw: The object.
        mean: Where it has no `image_mean`.
        std: Where it has no `image_std`.
    """
    factor = float(raw.get("rescale_factor", 1 / 255)) if raw.get("do_rescale", True) else 1.0
    if not raw.get("do_normalize", True):
        return Normalization(factor, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return Normalization(factor, _three(raw, "image_mean", mean), _three(raw, "image_std", std))


def _three(raw: Mapping[str, Any], field: str, default: Sequence[float]) -> tuple[float, float, float]:
    try:
        red, green, blue = map(float, raw.get(field) or default)
    except (TypeError, ValueError):
        raise ConfigError(f"{FILE}: {field} must be three numbers") from None
    if field == "image_std" and not red * green * blue:
        raise ConfigError(f"{FILE}: {field} must not be 0")
    return red, green, blue
