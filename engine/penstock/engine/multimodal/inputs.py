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
    cost: int = 0
    """Tokens of a prompt that take as long as the tower's run."""

    @property
    def work(self) -> int:
        """What its run takes of a step's budget."""
        return max(self.item.length, self.cost)

    @property
    def end(self) -> int:
        """The position after its last placeholder."""
        return self.item.start + self.item.length


class EncoderRun(msgspec.Struct, frozen=True, array_like=True):
    """An image's run through the tower, or a part of it, before a step's rows run."""

    identifier: str
    """Under which the runner keeps the embeddings."""
    pixels: Pixels | None
    """None: an earlier step has begun."""
    done: int
    """Work that is done after this step; the embeddings are there when all is."""
    work: int
