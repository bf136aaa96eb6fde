"""What does not even come to a handler: requests that are no HTTP, or have too long a header. aiohttp answers those in plain
text, and logs each with a traceback, as if the fault were ours."""

import asyncio
import logging
from typing import Any

from aiohttp import web

from penstock.engine.frontend.errors import ApiError, internal_error

log = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """One connection of a client, whose errors have OpenAI's shape."""

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """aiohttp's hook for whatever is wrong outside handlers; raises `ConnectionError` where an answer has begun."""
        if status >= 500:
            super().handle_error(request, status, exc, message)  # logs it
            error = internal_error()
        elif request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, so that there can be none that says what is wrong")
        else:
            reason = " ".join((message or "").split())
            log.info("refused what is no HTTP request, from %s: %s", request.remote, reason)
            error = ApiError(status, f"the request is not valid HTTP, or a part of it is too long: {reason}")
        response = error.response()
        response.force_close()
        return response


class _Server(web.Server):
    """Makes a `Connection` for each client. aiohttp has no argument for the class of its connections.

    Args:
        made: What aiohttp makes for the application.
    """

    def __init__(self, made: web.Server) -> None:
        super().__init__(
            made.request_handler, request_factory=made.request_factory, handler_cancellation=made.handler_cancellation
        )

    def __call__(self) -> web.RequestHandler:
        settings: dict[str, Any] = {"auto_decompress": False, "access_log": None}  # by its types there is always a log
        return Connection(self, loop=asyncio.get_running_loop(), **settings)


class Runner(web.AppRunner):
    """Serves an application with a `Connection` for each client.

    Args:
        app: The application.
        shutdown_timeout: Seconds that handlers get when it is cleaned up.
    """

    def __init__(self, app: web.Application, shutdown_timeout: float) -> None:
        super().__init__(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout)

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server())
