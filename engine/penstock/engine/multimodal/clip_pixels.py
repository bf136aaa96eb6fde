"""CLIP's image processor: the shorter side to a fixed length, then a square from the middle."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from PIL import Image

from penstock.engine.config import ConfigError
from penstock.engine.multimodal.normalization import Normalization, read_normalization
from penstock.engine.multimodal.pixels import Pixels

FILE: Final = "preprocessor_config.json"
_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)


class ClipPixels(msgspec.Struct, frozen=True, kw_only=True):
    """How an image of any size becomes the tower's square."""

    size: int
    """Of both sides."""
    shortest_edge: int
    """To which the shorter side is resized before the crop."""
    resample: int
    """Pillow's filter."""
    normalization: Normalization

    def pixels(self, image: Image.Image) -> Pixels:
        """The square; equal to transformers' processor but for what `normalization` does later."""
        width, height = image.size
        short = min(width, height)
        width, height = int(self.shortest_edge * width / short), int(self.shortest_edge * height / short)
        resized = image.resize((width, height), Image.Resampling(self.resample))
        left, top = (width - self.size) // 2, (height - self.size) // 2
        return Pixels.of(np.asarray(resized.crop((left, top, left + self.size, top + self.size))))


def read_clip_pixels(raw: Mapping[str, Any], size: int) -> ClipPixels:
    """Reads preprocessor_config.json.

    Args:
        raw: Its object.
        size: The side of the tower's square, by config.json.

    Raises:
        ConfigError: It asks for what is not supported, or for another size; the message names the field.
    """
    for field in ("do_resize", "do_center_crop"):
        if raw.get(field) is False:
            raise ConfigError(f"{FILE}: {field} is false, and images of any size are not supported by this model's tower")
    if raw.get("do_pad"):
        raise ConfigError(f"{FILE}: do_pad is not supported for this model")
    crop, edge = raw.get("crop_size") or size, raw.get("size") or size
    if isinstance(crop, Mapping):
        crop = crop.get("height") if crop.get("height") == crop.get("width") else None
    if isinstance(edge, Mapping):
        edge = edge.get("shortest_edge")
    if crop != size or not isinstance(edge, int) or edge < size:
        raise ConfigError(
            f"{FILE}: size {raw.get('size')} and crop_size {raw.get('crop_size')} do not give the tower's {size} x {size} pixels"
        )
    normalization = read_normalization(raw, _CLIP_MEAN, _CLIP_STD)
    return ClipPixels(size=size, shortest_edge=edge, resample=int(raw.get("resample", 3)), normalization=normalization)
