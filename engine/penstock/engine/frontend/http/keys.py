"""API keys: who may ask."""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from penstock.engine.frontend.errors import ApiError

OPEN_PATHS: Final = frozenset(
    ("/health", "/live", "/ready", "/load", "/metrics", "/prompt-bundle", "/version", "/openapi.json", "/docs")
)
"""What probes, the gateway and dashboards read without a key; everything else needs one."""


class ApiKeys:
    """Lets pass who has one of the keys.

    Args:
        keys: None of them empty; none at all: everybody passes.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, request: web.Request) -> None:
        """`ApiError` 401 for a request that needs a key and has none."""
        if not self._digests or request.path in OPEN_PATHS:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # All are compared, so that the time says nothing of which one is near.
        found = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(found):
            message = "send an API key of this server as authorization: Bearer KEY"
            raise ApiError(401, message, "authentication_error", param="authorization", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
