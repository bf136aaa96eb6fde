"""How the bytes of pages go from one rank to another. Who may have which page is settled on a TCP connection in any case.

A lender offers its transports when it lets a reader in. The reader takes the first of its own list that it can open.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from penstock.engine.connectors.transfer import wire
from penstock.engine.connectors.transfer.wire import Stream

Bytes = npt.NDArray[np.uint8]
_WORD: Final = 8


class Outlet(Protocol):
    """The lender's half of one transport."""

    def offer(self) -> bytes:
        """What a reader must know to open its half."""
        ...

    def send(self, stream: Stream, slots: Sequence[int]) -> None:
        """Sends pages, or returns when the reader has read them by itself."""
        ...

    def close(self) -> None:
        """Offers nothing any more."""
        ...


class Way(Protocol):
    """The reader's half, opened to one lender."""

    def read(self, stream: Stream, theirs: Sequence[int], into: Sequence[Bytes]) -> None:
        """Fills buffers with the pages of their slots; `OSError`, which `TimeoutError` is, where that fails.

        Nothing is written into these buffers after it has returned or raised.
        """
        ...

    def close(self) -> None:
        """Gives up what belongs to this lender."""
        ...


class Inlet(Protocol):
    """The reader's half of one transport."""

    def open(self, offer: bytes, deadline: float) -> Way:
        """Opens a way; `OSError` where this lender cannot be reached by it. `deadline` is a time on the monotonic clock."""
        ...


class TcpOutlet:
    """Pages follow each other on the connection.

    Args:
        slots: [slots, bytes of a page].
    """

    def __init__(self, slots: npt.NDArray[np.uint8]) -> None:
        self._slots = slots

    def offer(self) -> bytes:
        """Nothing: the connection is there."""
        return b""

    def send(self, stream: Stream, slots: Sequence[int]) -> None:
        """Sends them."""
        stream.send_buffers([self._slots[slot] for slot in slots])

    def close(self) -> None:
        """Nothing is open."""


class TcpInlet:
    """Receives them into their places. It is its own way to each lender."""

    def open(self, offer: bytes, deadline: float) -> "TcpInlet":
        """The connection is there."""
        return self

    def read(self, stream: Stream, theirs: Sequence[int], into: Sequence[Bytes]) -> None:
        """Receives pages in their order."""
        for buffer in into:
            stream.receive_into(buffer.data)

    def close(self) -> None:
        """Nothing is open."""


def await_read(stream: Stream) -> None:
    """Returns when the reader says that it has read the pages by itself."""
    stream.receive(wire.Read)


def page_sum(page: npt.NDArray[np.uint8]) -> int:
    """Return the sum of a page's 64-bit words modulo 2**64, by which its reader knows that it is whole.

    It differs for each single change and for a part of another page. zlib's CRC-32 takes six times as long.
    """
    whole = len(page) - len(page) % _WORD
    words = int(page[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + int.from_bytes(page[whole:].tobytes(), "little")) % 2**64
