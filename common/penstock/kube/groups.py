"""Which API groups the server serves: one cached query for all callers that wait for CRDs that are not installed."""

import asyncio
import json
import time
from typing import Final

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException

from penstock.kube.client import get

FRESH_S: Final = 2.5
"""Seconds for which an answer is reused, by all callers."""
_LIMITS: Final = aiohttp.ClientTimeout(total=10)


class Groups:
    """The API groups of one server. Every user may list them."""

    def __init__(self, api: ApiClient, *, fresh_s: float = FRESH_S) -> None:
        self._api = api
        self._fresh_s = fresh_s
        self._known: frozenset[str] = frozenset()
        self._asked = -float("inf")
        self._lock = asyncio.Lock()

    async def may_have(self, group: str) -> bool:
        """Return whether a group is served. True if the server does not say: a request for one of its objects then gets the
        reason."""
        async with self._lock:
            if time.monotonic() - self._asked >= self._fresh_s:
                try:
                    async with await get(self._api, "/apis", {}, _LIMITS) as response:
                        self._known = frozenset(it["name"] for it in json.loads(await response.read())["groups"])
                except (ApiException, aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
                    return True
                self._asked = time.monotonic()
            return group in self._known
