"""An image as it travels to the model: resized, and not yet normalised, so that it is an eighth of what the model reads.
Light to import: every process reads a model's settings, which make a sample of it."""

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Pixels(msgspec.Struct, frozen=True, array_like=True):
    """RGB, 8 bits a channel."""

    height: int
    width: int
    data: bytes
    """[height, width, 3], uint8."""
    original: tuple[int, int] | None = None
    """Height and width of the image that was resized, where its embeddings depend on them."""

    def array(self) -> "npt.NDArray[np.uint8]":
        """[height, width, 3]; read-only."""
        import numpy as np

        return np.frombuffer(self.data, np.uint8).reshape(self.height, self.width, 3)

    @staticmethod
    def of(array: "npt.NDArray[np.uint8]", original: tuple[int, int] | None = None) -> "Pixels":
        """The pixels of an array, [height, width, 3]."""
        height, width, _ = array.shape
        return Pixels(height, width, array.tobytes(), original)
