"""An image as it travels to the model: resized, and not yet normalised, so that it is an eighth of what the model reads."""

import msgspec
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

    def array(self) -> npt.NDArray[np.uint8]:
        """[height, width, 3]; read-only."""
        return np.frombuffer(self.data, np.uint8).reshape(self.height, self.width, 3)

    @staticmethod
    def of(array: npt.NDArray[np.uint8], original: tuple[int, int] | None = None) -> "Pixels":
        """The pixels of an array, [height, width, 3]."""
        height, width, _ = array.shape
        return Pixels(height, width, array.tobytes(), original)
