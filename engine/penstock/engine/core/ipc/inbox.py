"""The frontend's end of a connection to a core, on an event loop.

The loop watches the socket's descriptor and takes every message that has come at once: a coroutine per message, as
`zmq.asyncio` has it, costs several times as much (`make bench-ipc`).
"""

import asyncio
from collections import deque

import zmq

from penstock.engine.core.ipc.sockets import Context, has_message, opened


class Inbox:
    """A DEALER socket, which either binds or connects."""

    def __init__(self) -> None:
        self._context = Context()
        self._socket = opened(self._context, zmq.DEALER)
        self._messages: deque[bytes] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def bind(self, path: str) -> None:
        """Waits for the core at a Unix socket; raises `OSError` where there cannot be one."""
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror, path) from error
        self._watch()

    def connect(self, path: str) -> None:
        """Joins a core at its Unix socket, at once or when there is one."""
        self._socket.connect(f"ipc://{path}")
        self._watch()

    def send(self, payload: bytes) -> None:
        """Sends a message, behind those that the core has still to read; raises `ConnectionError` where there is no core."""
        if self._socket.closed:
            raise ConnectionError("the connection has been closed")
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again as error:
            raise ConnectionError("nobody is at the other end") from error
        self._take()  # the descriptor does not tell again what `send` may have seen

    async def next(self) -> bytes | None:
        """The next message in order; None where there is no more and `end` was called. For one task at a time."""
        if self._messages:
            await asyncio.sleep(0)  # behind: others get their turn all the same
        while not self._messages:
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._messages.popleft()

    def end(self) -> None:
        """Mark the end: no further messages will come."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Closes the connection, whatever is still to be sent; safe to call twice."""
        if not self._socket.closed:
            if self._loop is not None:
                self._loop.remove_reader(self._socket.fileno())
            self._context.destroy(linger=0)
        self.end()

    def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._take)
        self._take()

    def _take(self) -> None:
        """All that has come: the descriptor is readable once for any number of messages."""
        while has_message(self._socket):
            self._messages.append(self._socket.recv(zmq.NOBLOCK))
        if self._messages:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
