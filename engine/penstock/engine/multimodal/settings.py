"""How a model's images are prepared, as its checkpoint says. Light to import: every process reads it."""

import msgspec


class Normalization(msgspec.Struct, frozen=True):
    """`(channel · factor − mean) / std`, in transformers' order."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class ClipSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an image of any size becomes a square."""

    size: int
    """Pixels of both sides."""
    shortest_edge: int
    """To which the shorter side is resized before the crop."""
    resample: int
    """Pillow's filter."""


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a model makes of an image."""

    token_id: int
    """The placeholder in a prompt: a template writes one for an image, and each of its embeddings takes the place of one."""
    tokens: int
    """Embeddings of an image."""
    normalization: Normalization
    clip: ClipSettings
    limit: int = 16
    """Images of a request at most."""
    allowed_domains: tuple[str, ...] = ()
    """Host names from which images are fetched."""
