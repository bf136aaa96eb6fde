"""A list-watch cache: the objects of one resource, kept current, and what changed.

It never empties for want of an API server: while that is away, the last known objects stay.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException

from penstock.kube.backoff import Backoff
from penstock.kube.client import Object, Resource, asked_to_wait, latest_version, list_all, watch
from penstock.kube.groups import Groups

log = logging.getLogger(__name__)

GONE, NOT_FOUND, FORBIDDEN = 410, 404, 403
LONGEST_S = 5.0
"""Between tries to reach a server that is away: what happened meanwhile is known soon after it is back."""
ABSENT_S = 5.0
"""Between looks for a resource that the server does not know."""
# What a server, a network or a proxy in between can do to us. Anything else is a bug of ours and ends the cache loudly.
TROUBLE = (ApiException, aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError)

Key = tuple[str, str]
"""Namespace (empty for cluster-wide resources) and name."""


@dataclass(frozen=True)
class Change:
    """One object's change; `old` is None when it appeared, `new` is None when it went."""

    key: Key
    old: Object | None
    new: Object | None


def key_of(item: Object) -> Key:
    """The key under which the cache holds an object."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def trimmed(item: Object) -> Object:
    """A copy without `managedFields`, which are often half of an object and of no use to a reader."""
    metadata = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
    return {**item, "metadata": metadata}


class Cache:
    """The objects of one resource that match a selector. Treat them as read-only: they are shared.

    Callbacks run on the event loop, one change at a time, after the cache holds the new state; they must not block.
    """

    def __init__(
        self,
        api: ApiClient,
        resource: Resource,
        *,
        namespace: str | None = None,
        label_selector: str = "",
        trim: Callable[[Object], Object] = trimmed,
        optional: Groups | None = None,
        silence_s: float = 150.0,
        backoff: Backoff | None = None,
    ) -> None:
        """
        Args:
            namespace: None for all namespaces.
            trim: Makes the copy that is kept from what the server sent; it keeps name, namespace, UID and resource version.
            optional: The server may not know the resource (a CRD that is not installed): then the cache is complete and empty,
                and looks again where these say that its group is there.
            silence_s: After so long without an event or a bookmark (about one a minute) the watch is taken for dead.
        """
        self.synced = asyncio.Event()
        """Set after the first complete list, and never cleared."""
        self.answered = asyncio.Event()
        """Set with `synced`, and as well where the server says that it gives no list: it has none, or not for us."""
        self._api = api
        self._resource = resource
        self._path = resource.path(namespace)
        self._selectors = {"labelSelector": label_selector} if label_selector else {}
        self._trim = trim
        self._optional = optional
        self._silence_s = silence_s
        self._backoff = backoff or Backoff(longest=LONGEST_S)
        self._objects: dict[Key, Object] = {}
        self._callbacks: list[Callable[[Change], None]] = []
        self._version: str | None = None
        """Resource version from which the next watch starts. None: list first."""
        self._trouble = ""
        """What was last said of the server."""
        self._absent = False
        self._presence: list[Callable[[], None]] = []

    @property
    def objects(self) -> Mapping[Key, Object]:
        """A live view of everything the cache holds."""
        return MappingProxyType(self._objects)

    def subscribe(self, callback: Callable[[Change], None]) -> None:
        """Calls back for every change from now on."""
        self._callbacks.append(callback)

    @property
    def absent(self) -> bool:
        """Whether the server does not know the resource, as it was when last asked."""
        return self._absent

    def on_presence(self, callback: Callable[[], None]) -> None:
        """Calls back whenever the server comes to know the resource, or knows it no longer."""
        self._presence.append(callback)

    async def run(self) -> None:
        """Keeps the cache current until cancelled, whatever the API server does."""
        while True:
            asked = None
            try:
                if self._version is None or await self._put_back(self._version):
                    await self._relist()
                began = time.monotonic()
                await self._watch(self._version or "")
                if time.monotonic() - began >= 1.0:
                    continue  # the server's ordinary time limit; one that hangs up at once gets the back-off
            except TROUBLE as error:
                if self._optional is not None and isinstance(error, ApiException) and error.status == NOT_FOUND:
                    self._not_there()
                    await self._appearance(self._optional)
                    continue
                if isinstance(error, ApiException) and error.status == GONE:
                    self._version = None
                if isinstance(error, ApiException) and error.status in (FORBIDDEN, NOT_FOUND):
                    self.answered.set()
                reason = f"{type(error).__name__}: {error}"
                if isinstance(error, ApiException):
                    reason, asked = f"{error.status} {error.reason}", asked_to_wait(error)
                if reason != self._trouble:  # a server that is away says the same for hours
                    log.warning("watching %s: %s; %d objects stay as they are", self._path, reason, len(self._objects))
                self._trouble = reason
            await asyncio.sleep(max(self._backoff.next(), asked or 0.0))

    async def _appearance(self, groups: Groups) -> None:
        """Returns when the server may know the resource by now."""
        while True:
            await asyncio.sleep(ABSENT_S)
            if await groups.may_have(self._resource.group):
                return

    def _not_there(self) -> None:
        """The server answers, and does not know the resource. What was known stays: a CRD's objects go, one by one, before it."""
        if not self._absent:
            log.info("the API server has no %s (yet)", self._path)
        self._version = None
        self._turn(absent=True)
        self.synced.set()
        self.answered.set()

    def _turn(self, *, absent: bool) -> None:
        turned, self._absent = self._absent != absent, absent
        for callback in self._presence if turned else ():
            callback()

    async def _put_back(self, version: str) -> bool:
        """Whether the server's store was put back to a state from before this version: a watch would hear nothing until the store
        has come so far again. Such a server was stopped, which ended the watch, so that this is asked before each one."""
        return int(await latest_version(self._api, self._path, self._selectors)) < int(version)

    async def _relist(self) -> None:
        items, version = await list_all(self._api, self._path, self._selectors, self._trim)
        current = {key_of(item): item for item in items}
        for key in [key for key in self._objects if key not in current]:
            self._apply(key, None)
        for key, item in current.items():
            self._apply(key, item)
        self._version = version
        self._turn(absent=False)
        self._worked()
        self.synced.set()
        self.answered.set()

    async def _watch(self, version: str) -> None:
        # Watches of many caches that began together should not all end together.
        query = {**self._selectors, "resourceVersion": version, "timeoutSeconds": str(Random().randint(300, 600))}
        async for kind, item in watch(self._api, self._path, query, self._silence_s):
            if kind != "BOOKMARK":
                self._apply(key_of(item), None if kind == "DELETED" else self._trim(item))
            self._version = item["metadata"]["resourceVersion"]
            self._worked()

    def _worked(self) -> None:
        self._backoff.reset()
        self._trouble = ""

    def _apply(self, key: Key, item: Object | None) -> None:
        old = self._objects.get(key)
        if old is not None and item is not None:
            if old["metadata"].get("uid") != item["metadata"].get("uid"):
                self._apply(key, None)  # another object of the same name: its predecessor's end was missed
                old = None
            elif old["metadata"].get("resourceVersion") == item["metadata"].get("resourceVersion"):
                return  # a new list repeats what did not change
        if item is not None:
            self._objects[key] = item
        elif self._objects.pop(key, None) is None:
            return
        for callback in self._callbacks:
            callback(Change(key, old, self._objects.get(key)))
