"""The users' resources: kopf reports their changes, and our own lists report what kopf misses.

After a watch breaks, kopf 1.45 lists again and does not report what was deleted meanwhile, and several answers of a server end
it.
So all resources are listed at the start, whenever kopf has listed, and every minute; and kopf is started again.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException

from penstock.api.labels import GROUP, VERSION
from penstock.kube.backoff import Backoff
from penstock.kube.cache import ABSENT_S, LONGEST_S, NOT_FOUND, TROUBLE, trimmed
from penstock.kube.client import asked_to_wait, get, list_all
from penstock.operator import kopf_life
from penstock.operator.api import RESOURCES
from penstock.operator.handlers import ResourceWatch

log = logging.getLogger(__name__)

KINDS: Final = ("InferenceModel", "LoraAdapter")
SWEEP_S: Final = 60.0
SETTLE_S: Final = 0.5
"""Seconds from the first sign of a new list by kopf to our own list. Each object in kopf's list is such a sign."""
_LIMITS: Final = aiohttp.ClientTimeout(total=10)


class Users:
    """Keeps up with InferenceModels and LoraAdapters."""

    def __init__(self, api: ApiClient, watch: ResourceWatch, namespaces: Sequence[str], *, sweep_s: float = SWEEP_S) -> None:
        """
        Args:
            namespaces: None named: all.
        """
        self.known = asyncio.Event()
        """Set after the first complete lists, and never cleared."""
        self.absent: frozenset[str] = frozenset()
        """Kinds that the API server does not know."""
        self._api = api
        self._watch = watch
        self._namespaces = namespaces
        self._sweep_s = sweep_s
        self._asked = asyncio.Event()
        """A list is due before its time."""
        self._turned = asyncio.Event()
        """The server has come to know a kind, or knows one no longer."""

    async def run(self) -> None:
        """Keeps up until cancelled, whatever the API server does."""
        await asyncio.gather(self._sweep(), self._listen())

    async def _sweep(self) -> None:
        backoff, said = Backoff(longest=LONGEST_S), ""
        while True:
            self._asked.clear()
            try:
                await self._list_all()
            except TROUBLE as error:
                reason, pause_s = f"{type(error).__name__}: {error}", backoff.next()
                if isinstance(error, ApiException):
                    reason, pause_s = f"{error.status} {error.reason}", max(pause_s, asked_to_wait(error) or 0.0)
                if reason != said:  # a server that is away says the same for hours
                    log.warning("listing the users' resources: %s; what is known stays", reason)
                said = reason
                await asyncio.sleep(pause_s)
                continue
            backoff.reset()
            said = ""
            self.known.set()
            try:
                await asyncio.wait_for(self._asked.wait(), ABSENT_S if self.absent else self._sweep_s)
            except TimeoutError:
                continue
            await asyncio.sleep(SETTLE_S)

    async def _list_all(self) -> None:
        absent: set[str] = set()
        for kind in KINDS:
            for namespace in self._namespaces or (None,):
                newest = self._watch.newest(kind, namespace)
                try:
                    items, version = await list_all(self._api, RESOURCES[kind].path(namespace), {}, trimmed)
                except ApiException as error:
                    if error.status != NOT_FOUND:
                        raise
                    absent.add(kind)  # what was known stays: a CRD's objects go, one by one, before it
                    continue
                self._watch.listed(kind, namespace, items, int(version), newest)
        if absent != self.absent or not self.known.is_set():
            self.absent = frozenset(absent)
            self._turned.set()

    async def _listen(self) -> None:
        backoff = Backoff(longest=LONGEST_S)
        await self.known.wait()
        while True:
            began = time.monotonic()
            self._turned.clear()
            kinds = [kind for kind in KINDS if kind not in self.absent]
            life = asyncio.ensure_future(self._life(kinds)) if kinds else None
            turned = asyncio.ensure_future(self._turned.wait())
            try:
                await asyncio.wait([turned] if life is None else [turned, life], return_when=asyncio.FIRST_COMPLETED)
                if life is not None and life.done():
                    if time.monotonic() - began > self._sweep_s:
                        backoff.reset()
                    why = None if life.cancelled() else life.exception()
                    log.warning("kopf has ended, and starts again: %r", why)
                    self._asked.set()
                    await asyncio.sleep(backoff.next())
            finally:
                turned.cancel()
                if life is not None:
                    life.cancel()
                    await asyncio.wait([life])

    async def _life(self, kinds: Sequence[str]) -> None:
        """One life of kopf, which looks only once which kinds the server names."""
        backoff = Backoff(longest=LONGEST_S)
        while True:
            if await self._named(kinds):
                return await kopf_life.live(self._api, kinds, self._namespaces, self._heard)
            await asyncio.sleep(backoff.next())

    async def _named(self, kinds: Sequence[str]) -> bool:
        try:
            async with await get(self._api, f"/apis/{GROUP}/{VERSION}", {}, _LIMITS) as response:
                names = {it["name"] for it in json.loads(await response.read())["resources"]}
        except (*TROUBLE, KeyError, TypeError):
            return False
        return all(RESOURCES[kind].plural in names for kind in kinds)

    def _heard(self, kind: str | None, resource: dict[str, Any]) -> None:
        if self._watch.heard(kind, resource):
            self._asked.set()
