"""An image's width and height by the header of its file, without decoding it; and the size in which a model reads it."""

import math
from typing import Final

import msgspec

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of a frame, which hold its size."""
MAX_ASPECT: Final = 200
"""The longer side over the shorter one: resizing a thinner image to a model's height would take gigabytes."""


class DynamicSize(msgspec.Struct, frozen=True, kw_only=True):
    """A model reads an image in about its own size: sides are multiples of `factor`, and the area is bounded."""

    factor: int
    """Pixels of either side of the square that becomes one embedding."""
    min_pixels: int
    max_pixels: int

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in which an image is read; as Qwen's processors have it."""
        factor, area = self.factor, height * width
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if high * wide > self.max_pixels:
            shrink = math.sqrt(area / self.max_pixels)
            high, wide = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif high * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / area)
            high, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return high, wide

    def tokens(self, height: int, width: int) -> int:
        """Embeddings of an image of this size."""
        high, wide = self.resized(height, width)
        return (high // self.factor) * (wide // self.factor)


def image_size(data: bytes) -> tuple[int, int] | None:
    """Height and width that a file states, turned or not; None: it does not say, or no server reads such an image."""
    try:
        found = _stated(data)
    except IndexError:
        return None
    if found is None or not min(found) or max(found) > MAX_ASPECT * min(found):
        return None
    return found


def _stated(data: bytes) -> tuple[int, int] | None:
    if data.startswith(_PNG) and data[12:16] == b"IHDR":
        return _number(data, 20, 4, "big"), _number(data, 16, 4, "big")
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _number(data, 8, 2, "little"), _number(data, 6, 2, "little")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _of_webp(data)
    return _of_jpeg(data) if data.startswith(b"\xff\xd8") else None


def _of_webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return _number(data, 27, 3, "little") + 1, _number(data, 24, 3, "little") + 1
    if kind == b"VP8L":
        bits = _number(data, 21, 4, "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _number(data, 28, 2, "little") & 0x3FFF, _number(data, 26, 2, "little") & 0x3FFF
    return None


def _of_jpeg(data: bytes) -> tuple[int, int] | None:
    at = 2
    while data[at] == 0xFF:
        marker = data[at + 1]
        if marker in _FRAMES:
            return _number(data, at + 5, 2, "big"), _number(data, at + 7, 2, "big")
        if marker == 0xFF:  # filling
            at += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # without a length
            at += 2
        else:
            at += 2 + max(_number(data, at + 2, 2, "big"), 2)
    return None


def _number(data: bytes, at: int, size: int, order: str) -> int:
    if len(data) < at + size:
        raise IndexError
    return int.from_bytes(data[at : at + size], "big" if order == "big" else "little")
