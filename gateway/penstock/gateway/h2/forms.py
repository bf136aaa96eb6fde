"""The two forms of a connection: Python's, which is the statement, and the compiled one."""

from collections.abc import Mapping
from typing import Any, Protocol

from penstock.gateway.h2 import connection, limits
from penstock.gateway.h2.blocks import BlockCache
from penstock.gateway.h2.frames import Code
from penstock.gateway.h2.stream import Stream
from penstock.gateway.picker.compiled import Compiled


class Connection(Protocol):
    """See `penstock.gateway.h2.connection.Connection`. Its streams are of its own kind."""

    @property
    def streams(self) -> Mapping[int, Stream]:
        """Streams that we have not ended yet."""
        ...

    @property
    def closed(self) -> bool:
        """Ended by a fault: what is to be taken is the last."""
        ...

    @property
    def fault(self) -> str:
        """Which fault."""
        ...

    @property
    def urgent(self) -> bool:
        """Somebody waits for what is to be taken."""
        ...

    @property
    def patient(self) -> bool:
        """There is something to take, for which nobody waits."""
        ...

    @property
    def paused(self) -> bool:
        """The peer does not read."""
        ...

    @property
    def unsent(self) -> int:
        """Bytes of all streams that wait."""
        ...

    @property
    def max_frame(self) -> int:
        """The largest frame that the peer takes."""
        ...

    @property
    def receive_window(self) -> int:
        """Bytes that the peer may still send, on all streams."""
        ...

    def receive(self, data: bytes, now: float) -> None:
        """Takes in what the peer has sent."""
        ...

    def consumed(self, stream: Any, size: int) -> None:
        """Bytes of a stream were used up."""
        ...

    def message(self, stream: Any, block: bytes, message: bytes) -> None:
        """Sends a message of gRPC, after the head of the answer where there is a `block`."""
        ...

    def send(self, stream: Any, data: bytes) -> None:
        """Sends `data` when the windows allow it."""
        ...

    def end(self, stream: Any, block: bytes) -> None:
        """Ends the stream with trailers, after all data."""
        ...

    def reset(self, stream_id: int, code: Code) -> None:
        """Ends a stream at once."""
        ...

    def take(self) -> bytes:
        """What is to be written now."""
        ...

    def flushed(self) -> bool:
        """What was taken is written; whether there is more now."""
        ...

    def pause(self) -> None:
        """The peer does not read."""
        ...

    def resume(self) -> None:
        """The peer reads again."""
        ...

    def tick(self, now: float) -> None:
        """See to a silent peer."""
        ...

    def leave(self) -> None:
        """Asks the peer to open no more streams here."""
        ...

    def fail(self, code: Code, message: str) -> None:
        """Ends the connection."""
        ...


class Connect(Protocol):
    """Makes a connection."""

    def __call__(
        self, accept: connection.Accept, now: float, exchanges: object | None = None, taker: object | None = None
    ) -> Connection:
        """Makes one, of who takes its streams and the time. The compiled one takes exchanges in by itself; see
        `Compiled.Connection`."""
        ...


def connect_by(compiled: Compiled | None) -> Connect:
    """What makes connections, which share what they remember of header blocks."""
    if compiled is None:
        cache = BlockCache()
        return lambda accept, now, exchanges=None, taker=None: connection.Connection(accept, cache, now)
    blocks = compiled.BlockCache()
    return lambda accept, now, exchanges=None, taker=None: compiled.Connection(accept, blocks, now, limits, exchanges, taker)
