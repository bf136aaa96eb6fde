"""Errors that become answers in OpenAI's shape."""

from typing import Final

import orjson
from aiohttp import web

from penstock.api.errors import error_body
from penstock.api.headers import RETRIABLE
from penstock.engine import messages
from penstock.prompt.errors import PromptError

RETRY_AFTER_S = 1
MAX_MESSAGE: Final = 2000
"""Characters; names of fields and models come from the client, and may have any length."""
MAX_PARAM: Final = 256


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
        message = shortened(message, MAX_MESSAGE)
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = None if param is None else shortened(param, MAX_PARAM)
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


def shortened(text: str, length: int) -> str:
    """The text, or its beginning and its end where it is longer: what is wrong stands in one of them."""
    if len(text) <= length:
        return text
    half = (length - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def unavailable(message: str, code: str) -> ApiError:
    """Return a retryable 503: nothing was done or sent, so another replica can be tried."""
    return ApiError(503, message, "server_error", code=code, retriable=True)


def internal_error() -> ApiError:
    """A fault of ours, which the log tells in full."""
    return ApiError(500, "an error inside the engine; its log says more", "server_error")


def engine_error(message: str, code: str, param: str | None = None) -> ApiError:
    """What the core says of a request in words for machines; see `messages.Finished.code`."""
    match code:
        case messages.GRAMMAR_REFUSED | messages.TRANSFER_REFUSED:
            return ApiError(400, message, param=param, code=code)
        case messages.TENANT_QUEUE_FULL:
            return ApiError(429, message, "rate_limit_error", code=code, retriable=True)
        case messages.ADAPTER_GONE:
            return ApiError(404, message, param="model", code=code)
        case messages.REQUEST_TIMEOUT:
            return ApiError(504, message, "server_error", code=code)
        case _:
            return unavailable(message, code)
