"""Keeps the EndpointSlices of pickers as `plan` says, whenever a Service, an InferencePool, a gateway or its ports change."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException

from penstock.api import labels
from penstock.api.fleet import PoolsView
from penstock.kube.cache import Cache, Change
from penstock.kube.caches import Caches
from penstock.kube.groups import Groups
from penstock.operator.api import ENDPOINT_SLICES, INFERENCE_POOLS, SERVICES, Api, said
from penstock.operator.apply import MANAGER as FIELD_MANAGER
from penstock.operator.apply import owned, stamped
from penstock.operator.events import event, timestamp
from penstock.operator.objects import Object, as_pods
from penstock.operator.overlay import covers
from penstock.operator.pickers.plan import MANAGED_BY, MANAGER, active, planned, ports_of

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""After a write that failed."""


@dataclass(frozen=True)
class Watched:
    """What the slices are made of."""

    services: Caches
    """Those with the label `labels.PICKER`."""
    pools: Caches
    """All InferencePools."""
    slices: Caches
    """The EndpointSlices that the operator has made."""
    gateways: Cache
    """The pods of the gateway processes; run by whoever made it."""


def watched(client: ApiClient, namespaces: Sequence[str], groups: Groups, gateways: Cache) -> Watched:
    """Caches of these namespaces, or of all where none is named."""
    return Watched(
        Caches(client, SERVICES, namespaces, label_selector=f"{labels.PICKER}=true"),
        Caches(client, INFERENCE_POOLS, namespaces, optional=groups),
        Caches(client, ENDPOINT_SLICES, namespaces, label_selector=f"{MANAGED_BY}={MANAGER}"),
        gateways,
    )


class Pickers:
    """The Services of pickers in the users' namespaces, and their EndpointSlices."""

    def __init__(self, api: Api, watched: Watched) -> None:
        self._api = api
        self._watched = watched
        self._caches = (watched.services, watched.pools, watched.slices)
        self._ports: dict[str, dict[str, int]] = {}
        self._faults: set[tuple[str, str]] = set()
        """What has been said, by UID."""
        self._changed = asyncio.Event()
        for cache in (*self._caches, watched.gateways):
            cache.subscribe(self._wake)

    def _wake(self, _: Change) -> None:
        self._changed.set()

    def told(self, views: Sequence[PoolsView], asked: int) -> None:
        """Takes in what the gateways said at `/pools`."""
        ports = self._ports | {view.gateway: view.inference_pools for view in views}
        if ports != self._ports:
            self._ports = ports
            self._changed.set()

    async def run(self) -> None:
        """Keeps all slices until cancelled, whatever the API server does."""
        await asyncio.gather(self._keep(), *(cache.run() for cache in self._caches))

    async def _keep(self) -> None:
        # Nothing is judged before all is known: it would seem to be gone.
        await asyncio.gather(self._watched.gateways.synced.wait(), *(cache.synced() for cache in self._caches))
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not await self.sync():
                await asyncio.sleep(AGAIN_S)
                self._changed.set()

    async def sync(self) -> bool:
        """Writes what differs; whether all writes were taken."""
        gateways = as_pods(self._watched.gateways.objects.values())
        ports = ports_of(gateways, self._ports)
        if ports is None:
            return True
        plan = planned(self._watched.services.values(), self._watched.pools.values(), active(gateways), ports)
        await self._say(plan.faults)
        live = {_name(it): it for it in self._watched.slices.values()}
        wanted = {_name(it): it for it in plan.slices}
        done = [await self._put(item, live.get(name)) for name, item in wanted.items()]
        done += [await self._delete(item) for name, item in live.items() if name not in wanted]
        return all(done)

    async def _put(self, item: Object, live: Object | None) -> bool:
        marked, meta = stamped(item), item["metadata"]
        if live is not None and covers(live, marked):
            return True
        where = f"EndpointSlice {meta['namespace']}/{meta['name']}"

        async def write() -> None:
            there = live or await self._api.get("EndpointSlice", meta["namespace"], meta["name"])
            if there is not None and not owned(there, meta["ownerReferences"][0]["uid"]):
                log.warning("%s exists and is not of this Service: delete it", where)
                return
            log.info("%s: %s", where, _described(item))
            await self._api.apply(marked, FIELD_MANAGER)

        return await _tried(where, write())

    async def _delete(self, live: Object) -> bool:
        where = f"EndpointSlice {live['metadata']['namespace']}/{live['metadata']['name']}"
        log.info("deleting %s: no InferencePool is served there", where)
        return await _tried(where, self._api.delete({"kind": "EndpointSlice", **live}))

    async def _say(self, faults: Sequence[tuple[Object, str, str]]) -> None:
        """An Event for each fault that is new."""
        new = {(item["metadata"]["uid"], words): (item, reason, words) for item, reason, words in faults}
        for key in new.keys() - self._faults:
            item, reason, words = new[key]
            named = _kind(item)
            where = f"{named['kind']} {item['metadata']['namespace']}/{item['metadata']['name']}"
            log.warning("%s: %s", where, words)
            await _tried(where, self._api.create(event({**item, **named}, "Warning", reason, words, timestamp())))
        self._faults = set(new)


def _kind(item: Object) -> Mapping[str, str]:
    """What a list leaves out of its items."""
    if "endpointPickerRef" in item["spec"]:
        return {"apiVersion": f"{INFERENCE_POOLS.group}/{INFERENCE_POOLS.version}", "kind": "InferencePool"}
    return {"apiVersion": "v1", "kind": "Service"}


def _name(item: Object) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _described(item: Object) -> str:
    addresses = [address for endpoint in item["endpoints"] for address in endpoint["addresses"]]
    return f"{', '.join(addresses) or 'no gateway is ready'}, ports {', '.join(str(it['port']) for it in item['ports'])}"


async def _tried(where: str, write: Awaitable[Any]) -> bool:
    """Whether the server took a write; why not is logged."""
    try:
        await write
    except ApiException as error:
        log.warning("%s: %s", where, said(error))
        return False
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        log.warning("%s: %r", where, error)
        return False
    return True
