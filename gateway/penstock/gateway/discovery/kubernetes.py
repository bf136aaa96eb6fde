"""The fleet from the API server: InferenceModels and LoraAdapters, Gateway API's InferencePools, and the pods of all of them.

A kind that the cluster does not know is taken for empty, and noticed within seconds when its CRD is installed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kubernetes.aio.client import ApiClient

from penstock.api import labels
from penstock.api.fleet import Fleet
from penstock.gateway.discovery.objects import fleet_of, trimmed_pod
from penstock.gateway.discovery.pool_pods import PoolPods
from penstock.kube.cache import Change
from penstock.kube.caches import Caches
from penstock.kube.client import PODS, Object, Resource, connect
from penstock.kube.groups import Groups

MODELS = Resource(labels.GROUP, labels.VERSION, "inferencemodels")
ADAPTERS = Resource(labels.GROUP, labels.VERSION, "loraadapters")
INFERENCE_POOLS = Resource("inference.networking.k8s.io", "v1", "inferencepools")


class KubernetesDiscovery:
    """Watches in some namespaces, or in all where none is named."""

    def __init__(self, namespaces: Sequence[str], connect: Callable[[], Awaitable[ApiClient]] = connect) -> None:
        self._namespaces = namespaces
        self._connect = connect

    async def watch(self) -> AsyncIterator[Fleet]:
        """Yield the fleet once it is known completely, and again after each change."""
        async with await self._connect() as api:
            world = _World(api, self._namespaces)
            try:
                async for fleet in world.fleets():
                    yield fleet
            finally:
                await world.close()


class _World:
    """The caches of one connection."""

    def __init__(self, api: ApiClient, namespaces: Sequence[str]) -> None:
        self._changed = asyncio.Event()
        groups = Groups(api)
        self._models, self._adapters, self._inference_pools = (
            Caches(api, kind, namespaces, optional=groups) for kind in (MODELS, ADAPTERS, INFERENCE_POOLS)
        )
        self._pods = Caches(api, PODS, namespaces, label_selector=labels.MODEL, trim=trimmed_pod)
        self._pool_pods = PoolPods(api, self._wake)
        caches = (self._models, self._adapters, self._inference_pools, self._pods)
        self._tasks = [asyncio.create_task(cache.run()) for cache in caches]
        for cache, task in zip(caches, self._tasks, strict=True):
            cache.subscribe(self._wake)
            task.add_done_callback(self._wake)  # a cache ends only by a bug, which must end discovery too

    def _wake(self, _: Change | asyncio.Task[None]) -> None:
        self._changed.set()

    async def fleets(self) -> AsyncIterator[Fleet]:
        """The fleet once it is complete, and after each change that is one for us."""
        for cache in (self._models, self._adapters, self._inference_pools, self._pods):
            await cache.synced()
        await self._pool_pods.watch(self._pools())
        await self._pool_pods.synced()
        last = None
        while True:
            self._changed.clear()
            for task in [*self._tasks, *self._pool_pods.tasks.values()]:
                if task.done():
                    task.result()
            await self._pool_pods.watch(self._pools())
            fleet = fleet_of(
                self._models.values(),
                self._pods.values(),
                self._adapters.values(),
                self._pool_pods.selected(self._pools()),
            )
            if fleet != last:  # most of a pod's changes are none for us
                last = fleet
                yield fleet
            await self._changed.wait()

    def _pools(self) -> list[Object]:
        return list(self._inference_pools.values())

    async def close(self) -> None:
        """Ends all watches."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool_pods.close()
