"""Messages on a stream of bytes: four bytes of length, little endian, then the message."""

from typing import Final

LENGTH_BYTES: Final = 4


def framed(payload: bytes) -> bytes:
    """A message as it is sent."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


class Unframer:
    """Puts messages together from the pieces in which they come."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def is_amid(self) -> bool:
        """Whether a message has begun of which the rest is still to come."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Takes in a piece; returns the messages that it completes, in order."""
        rest, at, complete = self._rest, 0, list[bytes]()
        rest += data
        while len(rest) >= (begin := at + LENGTH_BYTES):
            end = begin + int.from_bytes(rest[at:begin], "little")
            if end > len(rest):
                break
            complete.append(bytes(rest[begin:end]))
            at = end
        del rest[:at]
        return complete
