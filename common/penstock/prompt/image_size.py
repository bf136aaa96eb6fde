"""An image's width and height by the header of its file, without decoding it; and the size in which a model reads it."""

import math
from typing import Final

import msgspec

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of a frame, which hold its size."""
_EXIF: Final = ((b"Exif\0\0", 6), (b"eXIf", 4), (b"EXIF", 8))
"""What is before EXIF data in JPEG, PNG and WebP, and how many bytes that is."""
_MAYBE_EXIF: Final = (b"tiff:Orientation", b"XML:com.adobe.xmp", b"Raw profile type")
"""Other forms of the same data, some of them compressed, which decoders read too."""
_ORIENTATION: Final = 0x112
_FIRST_QUARTER: Final = 5
"""Orientations from this one on turn an image by a quarter."""
MAX_ASPECT: Final = 200
"""The longer side over the shorter one: resizing a thinner image to a model's height would take gigabytes."""


class TowerCost(msgspec.Struct, frozen=True):
    """What a tower's run for an image takes, in tokens of text that take as long: `pixels · (linear + quadratic · pixels)`."""

    linear: float = 0.0
    quadratic: float = 0.0

    def tokens(self, pixels: int) -> int:
        """Of an image of so many pixels, as the tower reads it."""
        return math.ceil(pixels * (self.linear + self.quadratic * pixels))


class DynamicSize(msgspec.Struct, frozen=True, kw_only=True, tag="dynamic"):
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
        return self.pixels(height, width) // self.factor**2

    def pixels(self, height: int, width: int) -> int:
        """Pixels that the tower reads of an image of this size."""
        return math.prod(self.resized(height, width))


class TiledSize(msgspec.Struct, frozen=True, kw_only=True, tag="tiled"):
    """A model reads an image as one square, and once more in the tiles of a larger resolution, as LLaVA-NeXT does."""

    tile: int
    """Pixels of either side of the square, and of a tile."""
    side: int
    """Embeddings of either side of a tile."""
    resolutions: tuple[tuple[int, int], ...]
    """Height and width of each: multiples of a tile."""

    def resolution(self, height: int, width: int) -> tuple[int, int]:
        """The resolution that shows most of an image's pixels; of equal ones that with the least margin, else the first."""

        def worth(resolution: tuple[int, int]) -> tuple[int, int]:
            high, wide = resolution
            scale = min(wide / width, high / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            return shown, shown - high * wide

        return max(self.resolutions, key=worth)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image within its resolution; the rest is margin."""
        high, wide = self.resolution(height, width)
        if wide / width < high / height:
            return min(math.ceil(height * (wide / width)), high), wide
        return high, min(math.ceil(width * (high / height)), wide)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of a resolution's embeddings that are not margin."""
        high, wide = (pixels // self.tile * self.side for pixels in self.resolution(height, width))
        if width / height > wide / high:
            return high - (high - int(round(height * (wide / width), 7))) // 2 * 2, wide
        return high, wide - (wide - int(round(width * (high / height), 7))) // 2 * 2

    def tokens(self, height: int, width: int) -> int:
        """Embeddings of an image of this size: the square's, and the rows of the tiles, each with an end of its own."""
        rows, columns = self.grid(height, width)
        return self.side**2 + rows * (columns + 1)

    def pixels(self, height: int, width: int) -> int:
        """Pixels that the tower reads of an image of this size, margins included."""
        return self.tile**2 + math.prod(self.resolution(height, width))

    @property
    def most_tokens(self) -> int:
        """Embeddings of an image without margin at the largest resolution."""
        return max(self.tokens(high, wide) for high, wide in self.resolutions)


def is_turned(data: bytes) -> bool | None:
    """Whether a file's EXIF data turns it by a quarter, so that height and width change places; None: that is not clear.

    Specification: EXIF 2.32, section 4.6.4, in the places that JPEG, PNG and WebP have for it.
    """
    for mark, size in _EXIF:
        if (at := data.find(mark)) >= 0:
            try:
                found = _orientation(data, at + size)
            except IndexError:
                return None
            if found is not None:
                return found >= _FIRST_QUARTER
    return None if any(mark in data for mark in _MAYBE_EXIF) else False


def image_size(data: bytes) -> tuple[int, int] | None:
    """Height and width that a file states, turned or not; None: it does not say, or no server reads such an image."""
    try:
        found = _stated(data)
    except IndexError:
        return None
    if found is None or not min(found) or max(found) > MAX_ASPECT * min(found):
        return None
    return found


def _orientation(data: bytes, at: int) -> int | None:
    """Of the TIFF directory that begins at a place; None: it says nothing."""
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(data[at : at + 4])
    if order is None:
        return None
    directory = at + _number(data, at + 4, 4, order)
    for entry in range(_number(data, directory, 2, order)):
        place = directory + 2 + 12 * entry
        if _number(data, place, 2, order) == _ORIENTATION:
            return _number(data, place + 8, 2, order)
    return None


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
