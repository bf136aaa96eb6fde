"""Images in the size that a tower reads, by Pillow."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from PIL import Image

from penstock.engine.config import ConfigError
from penstock.engine.models.vision.config import PatchTowerConfig
from penstock.engine.multimodal.clip import clip_pixels
from penstock.engine.multimodal.normalization import FILE
from penstock.engine.multimodal.pixels import Pixels
from penstock.engine.multimodal.settings import ClipSettings, PatchSettings, SquareSettings, TileSettings
from penstock.engine.multimodal.tiles import tile_pixels
from penstock.prompt.image_size import DynamicSize

SIGLIP_MEAN: Final = (0.5, 0.5, 0.5)
SIGLIP_STD: Final = (0.5, 0.5, 0.5)
_BILINEAR: Final = 2
_BICUBIC: Final = 3
_MIN_PIXELS: Final = 56 * 56
_MAX_PIXELS: Final = 28 * 28 * 1280


def resized(image: Image.Image, settings: ClipSettings | SquareSettings | PatchSettings | TileSettings) -> Pixels:
    """What a model's tower reads, but for the normalisation; equal to transformers' processor for the model."""
    match settings:
        case ClipSettings():
            return clip_pixels(image, settings)
        case SquareSettings():
            return square_pixels(image, settings)
        case PatchSettings():
            return patch_pixels(image, settings)
        case TileSettings():
            return tile_pixels(image, settings)


def patch_pixels(image: Image.Image, settings: PatchSettings) -> Pixels:
    """The image in about its size."""
    height, width = settings.size.resized(image.height, image.width)
    return Pixels.of(np.asarray(image.resize((width, height), Image.Resampling(settings.resample))))


def square_pixels(image: Image.Image, settings: SquareSettings) -> Pixels:
    """The whole image as a square."""
    return Pixels.of(np.asarray(image.resize((settings.size, settings.size), Image.Resampling(settings.resample))))


def read_square(raw: Mapping[str, Any], size: int) -> SquareSettings:
    """Reads the object of `FILE`.

    Args:
        raw: It.
        size: The side of the tower's square, by config.json.

    Raises:
        ConfigError: It asks for what is not supported, or for another size; the message names the field.
    """
    if raw.get("do_resize") is False:
        raise ConfigError(f"{FILE}: do_resize is false, and images of any size are not supported by this model's tower")
    if raw.get("do_pan_and_scan"):
        raise ConfigError(f"{FILE}: do_pan_and_scan is not supported: an image is read as a whole")
    given = raw.get("size") or {"height": size, "width": size}
    if given != {"height": size, "width": size}:
        raise ConfigError(f"{FILE}: size {given} does not give the tower's {size} x {size} pixels")
    return SquareSettings(size=size, resample=int(raw.get("resample", _BILINEAR)))


def read_patches(raw: Mapping[str, Any], tower: PatchTowerConfig) -> PatchSettings:
    """Reads the object of `FILE`.

    Args:
        raw: It.
        tower: By config.json.

    Raises:
        ConfigError: It asks for what is not supported, or is for another tower; the message names the field.
    """
    if raw.get("do_resize") is False:
        raise ConfigError(f"{FILE}: do_resize is false, and sides that the tower cannot divide are not supported")
    for field, own in (
        ("patch_size", tower.patch_size),
        ("merge_size", tower.merge_size),
        ("temporal_patch_size", tower.temporal_patch_size),
    ):
        if raw.get(field, own) != own:
            raise ConfigError(f"{FILE}: {field} is {raw[field]!r}, and config.json says {own}")
    factor, size = tower.patch_size * tower.merge_size, raw.get("size") or {}
    least = raw.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS
    most = raw.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS
    if not isinstance(least, int) or not isinstance(most, int) or not factor**2 <= least <= most:
        raise ConfigError(
            f"{FILE}: min_pixels {least!r} and max_pixels {most!r} must be whole numbers, {factor**2} at least, in order"
        )
    resample = int(raw.get("resample", _BICUBIC))
    return PatchSettings(size=DynamicSize(factor=factor, min_pixels=least, max_pixels=most), resample=resample)
