"""A further frontend's side of a core that another process has started."""

from penstock.engine import messages
from penstock.engine.core.ipc.client import CoreConnection, CoreError
from penstock.engine.core.ipc.inbox import Inbox
from penstock.engine.messages import FRONTEND_SHIFT, CoreFailed, CoreInput, CoreOutput, CoreReady, FrontendJoined


class AttachedClient(CoreConnection):
    """One of several frontends of a core; used as `CoreClient` is.

    The process that started the core sees its exit status and reports its end by `gone`.

    Args:
        frontend: Its number, from 1 on, never used before.
        address: The core's address for further frontends.
    """

    def __init__(self, frontend: int, address: str) -> None:
        super().__init__(first_number=frontend << FRONTEND_SHIFT)
        self._frontend = frontend
        self._address = address
        self._inbox = Inbox()
        self._gone: str | None = None

    def gone(self, reason: str) -> None:
        """The core has ended: so does everything that waits for it."""
        self._gone = reason
        self._inbox.end()

    async def start(self) -> CoreReady:
        """Joins, and waits until the core is ready."""
        self._inbox.connect(self._address)
        await self._send(FrontendJoined(self._frontend))
        while not isinstance(message := await self._receive(), CoreReady):
            pass
        return message

    async def close(self) -> None:
        """Releases everything; safe to call twice."""
        self._inbox.close()

    async def _send(self, message: CoreInput) -> None:
        if self._gone is not None:
            raise CoreError(self._gone)
        try:
            self._inbox.send(messages.encode(message))
        except ConnectionError as error:
            raise CoreError(str(error)) from error

    async def _receive(self) -> CoreOutput:
        payload = await self._inbox.next()
        if payload is None:
            raise CoreError(self._gone or "the connection has been closed")
        message = messages.decode_output(payload)
        if isinstance(message, CoreFailed):
            raise CoreError(message.message)
        return message
