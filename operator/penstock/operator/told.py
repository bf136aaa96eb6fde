"""Events of others, as the reconciler asks for them: the API server reads all of a namespace for each answer."""

import asyncio
import logging
import time
from math import inf
from typing import Final

import aiohttp
from kubernetes.aio.client import ApiException

from penstock.operator.api import Api, said
from penstock.operator.failures import EVENTS_AGAIN_S, MAKING_S
from penstock.operator.objects import Object

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 5.0
_FORGET_S: Final = 2 * MAKING_S


class Told:
    """What was told, so that many models that start at once ask once, and one that changes often asks seldom."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: dict[tuple[str, str, str | None], tuple[float, list[Object]]] = {}

    async def events(self, namespace: str, kind: str, name: str | None = None) -> list[Object]:
        """The Events about objects of a kind, or about one of them, some seconds old. Where they cannot be had, those that were
        known: they explain, and nothing waits for them."""
        place, now = (namespace, kind, name), time.monotonic()
        asked, known = self._known.get(place, (-inf, []))
        if now - asked < (EVENTS_AGAIN_S if name is None else MAKING_S):
            return known
        self._known = {it: entry for it, entry in self._known.items() if now - entry[0] < _FORGET_S}
        self._known[place] = now, known
        try:
            async with asyncio.timeout(_PATIENCE_S):
                known = await self._api.events(namespace, kind, name)
        except (ApiException, aiohttp.ClientError, TimeoutError) as error:
            why = said(error) if isinstance(error, ApiException) else repr(error)
            log.warning("Events about %s in %s cannot be read, and with them why there are no replicas: %s", kind, namespace, why)
        self._known[place] = now, known
        return known
