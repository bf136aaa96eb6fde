"""A further frontend's side of a core that another process has started."""

import asyncio

import zmq
import zmq.asyncio

from penstock.engine import messages
from penstock.engine.core.ipc.client import CoreConnection, CoreError
from penstock.engine.messages import FRONTEND_SHIFT, CoreFailed, CoreInput, CoreOutput, CoreReady, FrontendJoined


class AttachedClient(CoreConnection):
    """One of several frontends of a core; used as `CoreClient` is.

    The end of the core is told from outside, by `gone`: whoever started it sees its exit status.

    Args:
        frontend: Its number, from 1 on, never used before.
        address: The core's for further frontends.
    """

    def __init__(self, frontend: int, address: str) -> None:
        super().__init__(first_number=frontend << FRONTEND_SHIFT)
        self._frontend = frontend
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def gone(self, reason: str) -> None:
        """The core has ended: so does everything that waits for it."""
        if not self._gone.done():
            self._gone.set_result(reason)

    async def start(self) -> CoreReady:
        """Joins, and waits until the core is ready."""
        await self._send(FrontendJoined(self._frontend))
        while not isinstance(message := await self._receive(), CoreReady):
            pass
        return message

    async def close(self) -> None:
        """Releases everything; safe to call twice."""
        self._socket.close()
        self._context.term()

    async def _send(self, message: CoreInput) -> None:
        if self._gone.done():
            raise CoreError(self._gone.result())
        await self._socket.send(messages.encode(message))

    async def _receive(self) -> CoreOutput:
        receive = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({receive, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not receive.done():
                raise CoreError(self._gone.result())
            message = messages.decode_output(receive.result())
        finally:
            receive.cancel()
        if isinstance(message, CoreFailed):
            raise CoreError(message.message)
        return message
