"""LLaVA-NeXT's image processor: the whole image as a square, then the tiles of a larger one."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from PIL import Image

from penstock.engine.config import ConfigError
from penstock.engine.models.vision.config import LlavaNextConfig
from penstock.engine.multimodal.clip import read_clip
from penstock.engine.multimodal.normalization import FILE
from penstock.engine.multimodal.pixels import Pixels
from penstock.engine.multimodal.settings import TileSettings
from penstock.prompt.image_size import TiledSize

_DEFAULT_EDGE: Final = 336


def tile_pixels(image: Image.Image, settings: TileSettings) -> Pixels:
    """The square and the tiles below it, row by row; equal to transformers' processor, which normalises them too."""
    size, resample = settings.size, Image.Resampling(settings.resample)
    high, wide = size.resolution(image.height, image.width)
    height, width = size.resized(image.height, image.width)
    whole = Image.new("RGB", (wide, high))
    whole.paste(image.resize((width, height), resample), ((wide - width) // 2, (high - height) // 2))
    rows = np.asarray(whole).reshape(high // size.tile, size.tile, wide // size.tile, size.tile, 3)
    tiles = rows.transpose(0, 2, 1, 3, 4).reshape(-1, size.tile, 3)
    square = np.asarray(image.resize((size.tile, size.tile), resample))
    return Pixels.of(np.concatenate([square, tiles]), (image.height, image.width))


def read_tiles(raw: Mapping[str, Any], vision: LlavaNextConfig) -> TileSettings:
    """Reads the object of `FILE`.

    Args:
        raw: It.
        vision: By config.json.

    Raises:
        ConfigError: It asks for what is not supported, or is for another model; the message names the field.
    """
    if raw.get("do_pad") is False:
        raise ConfigError(f"{FILE}: do_pad is false, and resolutions without a margin are not supported")
    tile = vision.tower.image_size
    clip = read_clip({"size": _DEFAULT_EDGE, "crop_size": _DEFAULT_EDGE} | {**raw, "do_pad": None}, tile)
    if clip.shortest_edge != tile:
        raise ConfigError(f"{FILE}: size {raw.get('size')} is not that of a tile, {tile}")
    given = raw.get("image_grid_pinpoints")
    if given is not None and given != [list(resolution) for resolution in vision.resolutions]:
        raise ConfigError(f"{FILE}: image_grid_pinpoints {given} is not what config.json says")
    side = tile // vision.tower.patch_size
    return TileSettings(size=TiledSize(tile=tile, side=side, resolutions=vision.resolutions), resample=clip.resample)
