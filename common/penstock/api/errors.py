"""Errors in OpenAI's JSON shape, the same from engine and gateway."""

from typing import Any


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error answer.

    Args:
        message: A sentence for people that says what to change.
        kind: OpenAI's `type`, such as `invalid_request_error`, `rate_limit_error` or `server_error`.
        param: The request field at fault.
        code: A word for machines, such as `model_not_found` or `context_length_exceeded`.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
