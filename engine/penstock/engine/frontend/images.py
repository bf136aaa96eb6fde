"""A request's images: read before its prompt becomes tokens, and put among them after."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.multimodal.reader import Fetched, ImageReader, ReadImage
from penstock.prompt.data_url import data_url
from penstock.prompt.processor import PromptProcessor

_HEAD_BYTES: Final = 64
"""Of a data URL beside the file, at most."""


class Placed(NamedTuple):
    """A prompt ready for the engine."""

    token_ids: list[int]
    images: tuple[ImageInput, ...]
    """Images in prompt order."""
    fetched: tuple[Fetched, ...] = ()
    """The files of those that were fetched."""


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
    return Placed(placed.token_ids, tuple(inputs), tuple(image.fetched for image in images if image.fetched is not None))


def with_files(messages: Sequence[Any], fetched: Sequence[Fetched], most: int) -> list[Any]:
    """A chat's messages with files in the places of their URLs, so that nobody fetches them again.

    Args:
        messages: As `penstock.prompt` has checked them.
        fetched: The files.
        most: Bytes of all data URLs together at most; what does not fit stays a URL.
    """
    urls: dict[str, str] = {}
    for url, data in fetched:
        if url not in urls and (size := 4 * len(data) // 3 + _HEAD_BYTES) <= most:
            urls[url], most = data_url(data), most - size

    def changed(part: Any) -> Any:
        image = part.get("image_url") if isinstance(part, dict) else None
        if not isinstance(image, dict) or image["url"] not in urls:
            return part
        return {**part, "image_url": {**image, "url": urls[image["url"]]}}

    def with_changes(message: Any) -> Any:
        content = message.get("content")
        return {**message, "content": [changed(part) for part in content]} if isinstance(content, list) else message

    return [with_changes(message) for message in messages]
