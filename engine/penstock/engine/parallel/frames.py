"""Messages on a stream socket, each behind its length."""

import socket
from typing import Final

from penstock.engine.core.ipc.framing import LENGTH_BYTES, framed

_READ_BYTES: Final = 1 << 16
_LARGEST: Final = (1 << 32) - 1


def send_frame(stream: socket.socket, message: bytes) -> None:
    """Sends one message."""
    stream.sendall(framed(message))


def receive_frame(stream: socket.socket, largest: int = _LARGEST) -> bytes | None:
    """Waits for one message; None: the other end is closed. Raises `ValueError` where it has more than `largest` bytes."""
    head = stream.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    if len(head) < LENGTH_BYTES:
        return None
    size = _checked(int.from_bytes(head, "little"), largest)
    body = bytearray(size)
    view, done = memoryview(body), 0
    while done < size:
        got = stream.recv_into(view[done:])
        if not got:
            return None
        done += got
    return bytes(body)


class FrameReader:
    """What has come so far, of a reader that does not wait.

    Args:
        stream: Read where there is something to read.
        largest: Bytes of a message at most; `read` raises `ValueError` for others.
    """

    def __init__(self, stream: socket.socket, largest: int = _LARGEST) -> None:
        self._stream, self._data, self._most = stream, bytearray(), largest
        self.ended = False
        """The other end is closed."""

    def read(self) -> list[bytes]:
        """Takes in what is there; the messages that are complete."""
        try:
            data = self._stream.recv(_READ_BYTES)
        except (ConnectionResetError, TimeoutError):  # of a machine that is gone the kernel gives up
            data = b""
        self.ended = not data
        self._data += data
        found = list[bytes]()
        while len(self._data) >= LENGTH_BYTES:
            end = LENGTH_BYTES + _checked(int.from_bytes(self._data[:LENGTH_BYTES], "little"), self._most)
            if len(self._data) < end:
                break
            found.append(bytes(self._data[LENGTH_BYTES:end]))
            del self._data[:end]
        return found


def _checked(size: int, largest: int) -> int:
    if size > largest:
        raise ValueError(f"a message of {size:,} bytes; the largest has {largest:,}")
    return size
