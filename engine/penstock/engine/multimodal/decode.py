"""From the bytes of a file to upright RGB pixels. Files come from strangers: headers are checked before anything is decoded."""

import io
from typing import Final

import numpy as np
from PIL import Image, ImageOps

from penstock.prompt.errors import PromptError
from penstock.prompt.image_size import MAX_ASPECT

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""Pillow reads many more, whose decoders are less well tested."""
MAX_PIXELS: Final = 50_000_000
"""A phone's largest photograph: 150 MB in memory."""
_WHITE: Final = (255, 255, 255, 255)
_BAND_PIXELS: Final = 1 << 20


def decode_image(data: bytes, param: str) -> Image.Image:
    """The first frame, turned as its EXIF data says, on white where it is transparent.

    Args:
        data: The file.
        param: The request's field that holds it.

    Raises:
        PromptError: It is no image, damaged, or too large; the message names the field.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise PromptError(f"{param} has more than {MAX_PIXELS} pixels", param) from None
    except Exception:  # noqa: BLE001 - a decoder raises whatever a strange file leads to
        raise PromptError(f"{param} is not an image; {', '.join(FORMATS)} can be read", param) from None
    with image:
        _check_size(image, param)
        try:
            return _rgb(ImageOps.exif_transpose(image))
        except Exception as error:  # noqa: BLE001 - as above
            raise PromptError(f"{param} is a damaged {image.format} image: {error}", param) from None


def _check_size(image: Image.Image, param: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise PromptError(f"{param} has {width} x {height} pixels; an image has at most {MAX_PIXELS}", param)
    if not width * height or max(width, height) > MAX_ASPECT * min(width, height):
        message = f"{param} has {width} x {height} pixels; one side is more than {MAX_ASPECT} times as long as the other"
        raise PromptError(message, param)


def _rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        return _on_white(image.convert("RGBA"))
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip to 8
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Colours of invisible pixels are arbitrary: without a background the model would see them.

    In bands, since Pillow holds the interpreter's lock meanwhile: half a second for a large image, in which no stream goes on.
    """
    found, rows = Image.new("RGB", image.size), max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        band = image.crop(box)
        found.paste(Image.alpha_composite(Image.new("RGBA", band.size, _WHITE), band).convert("RGB"), box)
    return found
