"""Reads of a request's body what a pick needs; the engine is the judge of everything else in it."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from penstock.gateway.extproc.call import Refused

MAX_BODY_BYTES = 20 * 1024 * 1024
"""The engine's limit."""
MAX_WORK = 2_000_000
"""What reading a body may cost, in values of a list: some 0.4 s without anybody else. Two million token ids are more than
any model reads."""
_LIST_WORK, _KEY_WORK = 12, 18
"""What a list or an object costs, and a key, in the same unit (measured with orjson)."""
_UNCOUNTED_BYTES = MAX_WORK // _KEY_WORK
"""Size of a body that is too small to need the limit."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
"""The names of the output tokens that a client wants at most; the first that is there counts."""


class Body(msgspec.Struct, frozen=True):
    """A parsed body."""

    model: str
    max_tokens: int | None
    fields: dict[str, Any]


def parse_body(raw: bytes) -> Body:
    """The body of a request with a prompt; raises `Refused` with 400 where it names no model."""
    if not raw:
        raise Refused(400, "the request has no body; send a JSON object", "invalid_body")
    if len(raw) > _UNCOUNTED_BYTES and _work(raw) > MAX_WORK and _work(_STRING.sub(b"", raw)) > MAX_WORK:
        raise Refused(400, "the body has too many lists, objects and values in it", "invalid_body")
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be a JSON object", "invalid_body")
    model = fields.get("model")
    if model is None:
        raise Refused(400, "model is missing: name the model that shall answer", "missing_model", param="model")
    if not isinstance(model, str) or not model:
        raise Refused(400, "model must be a non-empty string", "invalid_type", param="model")
    return Body(model, _limit(fields), fields)


def _limit(fields: Mapping[str, Any]) -> int | None:
    """The output tokens that the client wants at most, by the first of the names of that; None where it is no number."""
    for name in LIMITS:
        if (limit := fields.get(name)) is not None:
            return limit if type(limit) is int and limit >= 0 else None
    return None


def _work(raw: bytes) -> int:
    """What reading it costs, were there no strings in it."""
    return raw.count(b",") + _LIST_WORK * (raw.count(b"[") + raw.count(b"{")) + _KEY_WORK * raw.count(b":")


def too_large() -> Refused:
    """The refusal of a body beyond the limit."""
    message = f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB"
    return Refused(413, message, "body_too_large", code="request_too_large")
