"""Messages on a process's standard input: four bytes of length, little endian, then the message."""

from typing import Final

LENGTH_BYTES: Final = 4


def framed(payload: bytes) -> bytes:
    """Return a message with its length in front."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload
