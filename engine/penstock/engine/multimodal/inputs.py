"""Images on their way through the engine: from a request to the runner."""

import msgspec

from penstock.engine.multimodal.pixels import Pixels
from penstock.prompt.hashing import PromptItem


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt."""

    item: PromptItem
    """Where its placeholders lie."""
    pixels: Pixels
    grid: tuple[int, int] | None = None
    """Rows and columns of its embeddings, for models whose positions follow them."""

    @property
    def end(self) -> int:
        """The position after its last placeholder."""
        return self.item.start + self.item.length


class EncoderRun(msgspec.Struct, frozen=True, array_like=True):
    """An image whose embeddings a step makes before its rows run."""

    identifier: str
    """Under which the runner keeps them."""
    pixels: Pixels
