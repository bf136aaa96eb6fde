"""From the image parts of a request to what the engine takes, away from the event loop."""

import asyncio
import math
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import msgspec

from penstock.engine.host_memory import return_free_memory
from penstock.engine.multimodal.decode import decode_image
from penstock.engine.multimodal.fetch import Fetcher
from penstock.engine.multimodal.pixels import Pixels
from penstock.engine.multimodal.resize import resized
from penstock.engine.multimodal.settings import ImageSettings, PatchSettings
from penstock.prompt.data_url import SCHEME, read_data_url
from penstock.prompt.errors import PromptError
from penstock.prompt.image_size import image_size
from penstock.prompt.images import ImagePart

WORKERS: Final = 2
"""Images that are decoded at once: each takes up to half a gigabyte and a core."""


_LARGE_PIXELS: Final = 4_000_000
"""Of an image whose memory goes back to the system at once: the C library would keep it, for each thread."""
_NICENESS: Final = 10


def _step_back() -> None:
    """Lets the other threads of the machine go first: running requests do not wait for images of new ones."""
    if sys.platform == "linux":  # elsewhere it would be that of the process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


class Fetched(NamedTuple):
    """A file that was fetched."""

    url: str
    data: bytes


class ReadImage(NamedTuple):
    """An image that is ready for the engine."""

    identifier: str
    """By the content of its file; see `image_name`."""
    pixels: Pixels
    tokens: int
    """Embeddings."""
    grid: tuple[int, int] | None
    """Their rows and columns; None: all images have as many."""
    cost: int
    """Tokens of a prompt that take as long as the tower's run, as `ImageInput.cost`."""
    fetched: Fetched | None = None
    """Its file; None: the request held it."""


class ImageReader:
    """Fetches, decodes and resizes. To be closed.

    Args:
        settings: Of the model.
        fetcher: Gets what URLs name.
    """

    def __init__(self, settings: ImageSettings, fetcher: Fetcher) -> None:
        self._settings, self._fetcher = settings, fetcher
        self._pool = ThreadPoolExecutor(WORKERS, "images", _step_back)

    def close(self) -> None:
        """Ends the threads; images that no thread has begun with are given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def read(self, parts: Sequence[ImagePart]) -> list[ReadImage]:
        """The images, in the order of the parts. An image that a request holds several times is read once.

        Raises:
            PromptError: There are too many, or one cannot be read; the message names its part.
        """
        limit = self._settings.limit
        if len(parts) > limit:
            message = f"{parts[limit].param}: a request has at most {limit} images (--limit-mm-per-prompt)"
            raise PromptError(message, parts[limit].param)
        found: dict[str, ReadImage] = {}
        for part in parts:  # one after another, so that a request with many does not keep others waiting
            if part.url not in found:
                found[part.url] = await self._read(part)
        return [found[part.url] for part in parts]

    async def _read(self, part: ImagePart) -> ReadImage:
        data = None if part.url.startswith(SCHEME) else await self._fetcher.fetch(part.url, part.param)
        work = partial(self._decode, part, data)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _decode(self, part: ImagePart, fetched: bytes | None) -> ReadImage:
        data = read_data_url(part.url, part.param) if fetched is None else fetched
        try:
            return self._decoded(part, data, fetched)
        finally:
            if math.prod(image_size(data) or ()) >= _LARGE_PIXELS:
                return_free_memory()

    def _decoded(self, part: ImagePart, data: bytes, fetched: bytes | None) -> ReadImage:
        resize = self._settings.resize
        if part.size is not None:
            assert isinstance(resize, PatchSettings), "images of other models have a size that no request changes"
            resize = msgspec.structs.replace(resize, size=part.size)
        pixels = resized(decode_image(data, part.param), resize)
        grid = self._settings.grid(pixels.height, pixels.width)
        cost = self._settings.cost.tokens(pixels.height * pixels.width)
        tokens, file = self._settings.tokens_of(pixels), None if fetched is None else Fetched(part.url, fetched)
        return ReadImage(part.name(data), pixels, tokens, grid, cost, file)
