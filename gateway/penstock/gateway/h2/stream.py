"""One stream of a connection: its windows, what it has yet to send, and who hears of it."""

from typing import Protocol

from penstock.gateway.h2.blocks import Head
from penstock.gateway.h2.frames import Code


class Receiver(Protocol):
    """Receives what comes on a stream. No method may raise."""

    def data(self, data: bytes) -> None:
        """Receive the next bytes, never empty. Call `Connection.consumed` when they are used up."""
        ...

    def end(self) -> None:
        """The peer has sent all."""
        ...

    def reset(self, code: Code) -> None:
        """The stream is gone before its end, by the peer's will or by a fault: nothing more comes or goes."""
        ...

    def sent(self) -> None:
        """All that was to be sent is on its way."""
        ...


class Stream:
    """A stream from its request's headers until we have ended it."""

    __slots__ = (
        "answered", "content_length", "ended", "head", "id", "open", "receive_window", "receiver", "send_window",
        "trailers", "unacknowledged", "waiting",
    )  # fmt: skip

    def __init__(self, stream_id: int, head: Head, send_window: int, receive_window: int) -> None:
        self.id = stream_id
        self.head = head
        self.receiver: Receiver | None = None
        self.open = True
        """True while we may still send."""
        self.answered = False
        """We have sent it data."""
        self.ended = False
        """The peer has said all."""
        self.send_window = send_window
        self.receive_window = receive_window
        self.unacknowledged = 0
        """Bytes used up that the peer has no new window for yet."""
        self.waiting = bytearray()
        """What waits for a window, or its turn."""
        self.trailers: bytes | None = None
        """The block that ends the stream once `waiting` is out."""
        self.content_length = head.content_length

    @property
    def unsent(self) -> int:
        """Bytes that wait."""
        return len(self.waiting)
