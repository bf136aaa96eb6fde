"""A request's images: read before its prompt becomes tokens, and put among them after."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.multimodal.reader import ImageReader, ReadImage
from penstock.prompt.processor import PromptProcessor


class Placed(NamedTuple):
    """A prompt ready for the engine."""

    token_ids: list[int]
    images: tuple[ImageInput, ...]
    """Images in prompt order."""


async def read_images(
    path: str, body: Mapping[str, Any], processor: PromptProcessor, reader: ImageReader | None
) -> list[ReadImage]:
    """The images in a body; none where the model reads text alone, whose prompt says what is wrong with them.

    Args:
        path: Of the API whose body it is.
        body: As it came.
        processor: Of the model.
        reader: Of the model; None: it reads text alone.

    Raises:
        PromptError: An image cannot be read; the message names its part.
    """
    parts = processor.images_of(path, body)
    if not parts or reader is None:
        return []
    return await reader.read(parts)


def place_images(path: str, token_ids: list[int], images: Sequence[ReadImage], processor: PromptProcessor) -> Placed:
    """The prompt with room for its images; raises `PromptError` where it has more or fewer placeholders than images."""
    if processor.bundle.images is None:
        return Placed(token_ids, ())
    placed = processor.place(path, token_ids, [(image.identifier, image.tokens) for image in images])
    inputs = [ImageInput(item, image.pixels, image.grid, image.cost) for item, image in zip(placed.items, images, strict=True)]
    return Placed(placed.token_ids, tuple(inputs))
