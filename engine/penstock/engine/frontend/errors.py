"""Errors that become answers in OpenAI's shape."""

import orjson
from aiohttp import web

from penstock.api.errors import error_body
from penstock.api.headers import RETRIABLE
from penstock.engine import messages
from penstock.prompt.errors import PromptError

RETRY_AFTER_S = 1


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: A sentence for people that says what to change.
        kind: OpenAI's `type`.
        param: The request field or header at fault.
        code: A word for machines.
        retriable: Nothing of the answer has been sent and another replica may give it: the gateway then tries the next.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        retriable: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retriable = retriable

    @staticmethod
    def from_prompt(error: PromptError) -> "ApiError":
        """A prompt that cannot become tokens."""
        return ApiError(400, str(error), param=error.param, code=error.code)

    def body(self) -> bytes:
        """The error as JSON, for an answer or for an event in a stream that has begun."""
        return orjson.dumps(error_body(self.message, self.kind, param=self.param, code=self.code))

    def response(self) -> web.Response:
        """The whole answer."""
        headers = {}
        if self.retriable:
            headers = {RETRIABLE: "true", "retry-after": str(RETRY_AFTER_S)}
        if self.status == 401:
            headers = {"www-authenticate": "Bearer"}
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)


def unavailable(message: str, code: str) -> ApiError:
    """Nothing was done, or nothing was sent: try another replica."""
    return ApiError(503, message, "server_error", code=code, retriable=True)


def engine_error(message: str, code: str) -> ApiError:
    """What the core says of a request that was not at fault; see `messages.Finished.code`."""
    match code:
        case messages.TENANT_QUEUE_FULL:
            return ApiError(429, message, "rate_limit_error", code=code, retriable=True)
        case messages.REQUEST_TIMEOUT:
            return ApiError(504, message, "server_error", code=code)
        case _:
            return unavailable(message, code)
