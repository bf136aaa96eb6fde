"""How a model's images are prepared, as its checkpoint says. Light to import: every process reads it."""

import math
from typing import Any, Final

import msgspec

from penstock.engine.multimodal.pixels import Pixels
from penstock.prompt.image_size import DynamicSize, TiledSize, TowerCost

_SAMPLE: Final = 256
"""Embeddings of a sample."""


class Normalization(msgspec.Struct, frozen=True):
    """`(channel · factor − mean) / std`, in transformers' order."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class ClipSettings(msgspec.Struct, frozen=True, kw_only=True, tag="clip"):
    """CLIP's: an image becomes a square without what lies outside."""

    size: int
    """Pixels of both sides."""
    shortest_edge: int
    """To which the shorter side is resized before the crop."""
    resample: int
    """Pillow's filter."""


class SquareSettings(msgspec.Struct, frozen=True, kw_only=True, tag="square"):
    """An image becomes a square whatever its shape was."""

    size: int
    """Pixels of both sides."""
    resample: int
    """Pillow's filter."""


class PatchSettings(msgspec.Struct, frozen=True, kw_only=True, tag="patches"):
    """An image keeps about its size and shape."""

    size: DynamicSize
    resample: int
    """Pillow's filter."""


class TileSettings(msgspec.Struct, frozen=True, kw_only=True, tag="tiles"):
    """An image becomes a square, and tiles of a larger one."""

    size: TiledSize
    resample: int
    """Pillow's filter."""


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a model makes of an image."""

    token_id: int
    """The placeholder in a prompt: each of an image's embeddings takes the place of one."""
    begin_id: int | None = None
    """What a template writes for an image, and a prompt has before the placeholders. None: a template writes the placeholder."""
    end_id: int | None = None
    """What a prompt has after the placeholders, where there is a `begin_id`."""
    tokens: int
    """Embeddings of an image, or of the largest where that depends on its size."""
    two_way: bool = False
    """Whether the tokens of an image see each other both ways, so that no chunk may cut an image."""
    normalization: Normalization
    resize: ClipSettings | SquareSettings | PatchSettings | TileSettings
    """How an image of any size becomes what the tower reads."""
    cost: TowerCost = TowerCost()
    """Of the tower beside the decoder."""
    limit: int = 16
    """Images of a request at most."""
    allowed_domains: tuple[str, ...] = ()
    """Host names from which images are fetched."""

    def grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Rows and columns of embeddings of an image that has been resized; None: all images have as many."""
        if not isinstance(self.resize, PatchSettings):
            return None
        factor = self.resize.size.factor
        return height // factor, width // factor

    def tokens_of(self, pixels: Pixels) -> int:
        """Embeddings of an image that has been resized."""
        if isinstance(self.resize, TileSettings):
            assert pixels.original is not None
            return self.resize.size.tokens(*pixels.original)
        grid = self.grid(pixels.height, pixels.width)
        return self.tokens if grid is None else grid[0] * grid[1]

    def takes_places_of(self, other: "ImageSettings") -> bool:
        """Whether a tower makes as many embeddings of the same pixels as another one, for the same placeholders."""
        return self._places() == other._places()

    def _places(self) -> tuple[Any, ...]:
        match self.resize:
            case PatchSettings(size=size):
                shape = ("patches", size.factor)
            case TileSettings(size=tiled):
                shape = ("tiles", tiled)
            case ClipSettings(size=side) | SquareSettings(size=side):
                shape = ("square", side, self.tokens)
        return self.token_id, self.begin_id, self.end_id, self.two_way, shape

    def sample(self) -> Pixels:
        """A black image that tells what images take: of the only size, or one that is quickly read."""
        original = None
        match self.resize:
            case PatchSettings(size=size):
                height = width = math.isqrt(min(self.tokens, _SAMPLE)) * size.factor
            case TileSettings(size=size):
                original = min(size.resolutions, key=math.prod)
                height, width = size.tile + math.prod(original) // size.tile, size.tile
            case ClipSettings(size=side) | SquareSettings(size=side):
                height = width = side
        return Pixels(height, width, bytes(3 * height * width), original)
