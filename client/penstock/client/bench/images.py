"""Images of noise for requests: as PNG files in `data:` URLs, each another one."""

import base64
import struct
import zlib
from typing import Final, NamedTuple

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class RandomImages(NamedTuple):
    """What the images of a request are."""

    number: int
    """Of a request."""
    width: int
    height: int
    """Pixels."""

    def draw(self, rng: np.random.Generator) -> tuple[str, ...]:
        """The images of one request."""
        return tuple(_data_url(self.width, self.height, rng) for _ in range(self.number))


NO_IMAGES: Final = RandomImages(0, 0, 0)


def _data_url(width: int, height: int, rng: np.random.Generator) -> str:
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # before each row, the number of its filter: none
    rows[:, 1:] = rng.integers(0, 256, (height, 3 * width), np.uint8)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")
    data = _SIGNATURE + b"".join(_chunk(*chunk) for chunk in chunks)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Specification: PNG, second edition, section 5.3."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
