"""One gRPC call: what grpc.aio calls a `ServicerContext`, as far as services here use one."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn, Protocol

import grpc
from grpc.aio import EOF, AbortError  # pyright: ignore[reportAttributeAccessIssue] - generated at import

from penstock.gateway.h2 import limits
from penstock.gateway.h2.forms import Connection
from penstock.gateway.h2.frames import Code
from penstock.gateway.h2.messages import OK, OK_ALONE, RESPONSE_HEAD, Assembler, CallFault, Compressed, trailers
from penstock.gateway.h2.stream import Stream
from penstock.gateway.h2.worker import PAUSE, Worker

HIGH_WATER_BYTES = 64 * 1024
"""Writers wait while more than this of their stream is unsent."""

log = logging.getLogger(__name__)


class Method(Protocol):
    """What is called."""

    @property
    def serialize(self) -> Callable[[Any], bytes]:
        """Makes bytes of an answer."""
        ...

    def deserialize(self, message: bytes) -> Any:
        """The message; raises `CallFault` where it is none."""
        ...

    async def run(self, call: "Call") -> None:
        """Lets the service answer `call`."""
        ...


class Unread(Protocol):
    """What counts the bytes that no call has read."""

    unread: int


class Peer(Protocol):
    """The connection with its transport, as a call sees it."""

    connection: Connection
    address: str

    @property
    def server(self) -> "Unread":
        """The server whose limits apply."""
        ...

    def flush_soon(self) -> None:
        """Writes what is in `connection.out` before long."""
        ...

    def step_soon(self, worker: Worker) -> None:
        """Lets a service go on: when all is taken in that was read with what it waits for."""
        ...

    def left(self) -> None:
        """A call has ended."""
        ...


class Call:
    """A call from its headers to its trailers. Its service runs in a task of its own (see `Worker`), which a reset cancels.

    Args:
        peer: Who calls.
        stream: Where.
        method: What is called.
        max_message_bytes: The largest message taken.
        timeout_s: What the caller gives it; None for ever.
    """

    __slots__ = (
        "_assembler", "_ended", "_expired", "_gone", "_headed", "_held", "_inbox", "_method", "_owed", "_peer", "_readable",
        "_stream", "_timer", "_worker", "_writable",
    )  # fmt: skip

    def __init__(self, peer: Peer, stream: Stream, method: Method, max_message_bytes: int, timeout_s: float | None) -> None:
        self._peer, self._stream, self._method = peer, stream, method
        self._assembler = Assembler(max_message_bytes, stream.head.get("grpc-encoding"))
        self._inbox: deque[bytes] = deque()
        self._held = 0  # bytes in `_inbox`, and of a message that is not complete
        self._owed = 0  # bytes for which the caller gets a new window when the inbox is empty
        self._ended = self._gone = self._headed = self._expired = False
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, self._expire)
        self._worker = Worker(self._run(), peer.step_soon, self._over)

    # --- Receiver ---

    def data(self, data: bytes) -> None:
        """Receive the next bytes, never empty."""
        if self._gone or self._worker.finished:  # nobody will read it: it is neither kept nor judged, and gets no new window
            return None
        try:
            messages = self._assembler.feed(data)
        except CallFault as fault:
            return self._stop(fault)
        size, server = len(data), self._peer.server
        if self._inbox:
            self._owed += size
        else:
            self._peer.connection.consumed(self._stream, size)
        self._inbox += messages
        self._held += size
        server.unread += size
        if server.unread > limits.MAX_UNREAD_BYTES:
            return self._stop(CallFault(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many messages wait to be read"))
        if messages:
            self._wake_reader()
        return None

    def end(self) -> None:
        """The peer has sent all."""
        if self._gone or self._worker.finished:
            return None
        if self._assembler.partial:
            return self._stop(CallFault(grpc.StatusCode.INTERNAL, "the last message is not complete"))
        self._ended = True
        self._wake_reader()
        return None

    def reset(self, code: Code) -> None:
        """The stream is gone before its end, by the peer's will or by a fault: nothing more comes or goes."""
        self._gone = True
        self._worker.cancel()
        self._readable, self._writable = _wake(self._readable), _wake(self._writable)

    def sent(self) -> None:
        """All that was to be sent is on its way."""
        self._writable = _wake(self._writable)

    # --- ServicerContext ---

    async def read(self) -> Any:
        """The next message; `grpc.aio.EOF` after the last."""
        while not self._inbox:
            if self._gone:
                raise asyncio.CancelledError
            if self._ended:
                return EOF
            if self._worker.stepping:
                await PAUSE
            else:  # a task that the service has made
                if self._readable is None:
                    self._readable = asyncio.get_running_loop().create_future()
                await self._readable
        message = self._inbox.popleft()
        if not self._inbox:
            self._release(self._held - self._assembler.partial)
            if self._owed:
                self._peer.connection.consumed(self._stream, self._owed)
                self._owed = 0
                self._peer.flush_soon()
        return self._method.deserialize(self._assembler.expanded(message) if type(message) is Compressed else message)

    async def write(self, message: Any) -> None:
        """Sends a message; waits while the caller does not read."""
        if self._gone:
            raise asyncio.CancelledError
        stream, block = self._stream, b"" if self._headed else RESPONSE_HEAD
        self._headed = True
        self._peer.connection.message(stream, block, self._method.serialize(message))
        self._peer.flush_soon()
        while stream.unsent > HIGH_WATER_BYTES:
            if self._writable is None:
                self._writable = asyncio.get_running_loop().create_future()
            await self._writable
            if self._gone:
                raise asyncio.CancelledError

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with this status, by an exception."""
        raise AbortError(code, details)

    def cancelled(self) -> bool:
        """The caller has gone."""
        return self._gone

    def done(self) -> bool:
        """True once no more can be sent."""
        return not self._stream.open

    def peer(self) -> str:
        """The caller's address, as gRPC writes it."""
        return self._peer.address

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """The call's headers."""
        return self._stream.head.fields

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The caller's messages."""
        while (message := await self.read()) is not EOF:
            yield message

    # --- inside ---

    async def _run(self) -> None:
        try:
            await self._method.run(self)
        except AbortError as abort:
            self._finish(*abort.args)
        except CallFault as fault:
            self._finish(fault.code, fault.details)
        except asyncio.CancelledError:
            if self._expired and not self._gone:
                self._finish(grpc.StatusCode.DEADLINE_EXCEEDED, "the caller's time is up")
        except Exception as error:
            log.exception("%s failed", self._stream.head.pseudo[":path"])
            self._finish(grpc.StatusCode.UNKNOWN, type(error).__name__)
        else:
            self._finish(grpc.StatusCode.OK, "")

    def _wake_reader(self) -> None:
        if self._readable is not None:
            self._readable = _wake(self._readable)
        self._worker.resume()

    def _over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._held:
            self._release(self._held)
        self._peer.left()

    def _finish(self, code: grpc.StatusCode, details: str) -> None:
        if code is grpc.StatusCode.OK and not details:
            block = OK if self._headed else OK_ALONE
        else:
            block = trailers(code, details, alone=not self._headed)
        self._peer.connection.end(self._stream, block)
        self._peer.flush_soon()

    def _stop(self, fault: CallFault) -> None:
        """The caller has made a mistake: ends the call with its status, whatever the service does."""
        self._finish(fault.code, fault.details)
        self._gone = True
        self._worker.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._worker.cancel()

    def _release(self, size: int) -> None:
        self._held -= size
        self._peer.server.unread -= size


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
