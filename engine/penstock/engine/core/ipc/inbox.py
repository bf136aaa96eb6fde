"""What the core says to a frontend, on an event loop: the reader is woken without a task, a poll or a thread between."""

import asyncio
from collections import deque
from typing import cast

from penstock.engine.core.ipc.framing import Unframer, framed


class Inbox(asyncio.Protocol):
    """The frontend's end of a connection to a core."""

    def __init__(self) -> None:
        self._frames = Unframer()
        self._messages: deque[bytes] = deque()
        self._transport: asyncio.WriteTransport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    @property
    def is_open(self) -> bool:
        """Whether what is sent may be read."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, payload: bytes) -> None:
        """Sends a message, or keeps it until there is room for it; of no effect where the core has closed its end."""
        if self._transport is not None and self.is_open:
            self._transport.write(framed(payload))

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
        """Nothing more will come than what is here now."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Closes the connection, whatever is still to be sent; safe to call twice."""
        if self._transport is not None:
            self._transport.abort()
        self.end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's are none by their class

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if messages := self._frames.feed(data):
            self._messages += messages
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
