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
        data = _received(self._stream, _READ_BYTES)
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


class FirstFrame:
    """The first message of a connection that does not block, and no byte beyond: what follows is for whom the message names.

    Args:
        stream: Read where there is something to read.
        largest: Bytes of the message at most; `read` raises `ValueError` where it has more.
    """

    def __init__(self, stream: socket.socket, largest: int) -> None:
        self._stream, self._data, self._most = stream, bytearray(), largest
        self.ended = False
        """The other end is closed."""

    def read(self) -> bytes | None:
        """Takes in what is there; the message, once it is complete."""
        while (missing := self._missing()) and not self.ended:
            try:
                data = _received(self._stream, min(missing, _READ_BYTES))
            except BlockingIOError:
                return None
            self.ended = not data
            self._data += data
        return None if missing else bytes(self._data[LENGTH_BYTES:])

    def _missing(self) -> int:
        """Bytes until the length is known, and then until the message is complete."""
        if len(self._data) < LENGTH_BYTES:
            return LENGTH_BYTES - len(self._data)
        return LENGTH_BYTES + _checked(int.from_bytes(self._data[:LENGTH_BYTES], "little"), self._most) - len(self._data)


def peer(stream: socket.socket) -> str:
    """The address of the other end, for messages."""
    try:
        return str(stream.getpeername()[0])
    except OSError:  # it is gone already
        return "somewhere"


def _received(stream: socket.socket, most: int) -> bytes:
    """What is there; nothing where the other end is closed or gone. Raises `BlockingIOError` where there is nothing yet."""
    try:
        return stream.recv(most)
    except BlockingIOError:
        raise
    except OSError:  # of a machine that is gone the kernel gives up, with the errors of the way to it
        return b""


def _checked(size: int, largest: int) -> int:
    if size > largest:
        raise ValueError(f"a message of {size:,} bytes; the largest has {largest:,}")
    return size
