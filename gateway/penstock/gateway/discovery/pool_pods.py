"""The pods that InferencePools select: one watch for each namespace and selector, begun and ended as pools come and go."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from kubernetes.aio.client import ApiClient

from penstock.gateway.discovery.objects import trimmed_pod
from penstock.kube.cache import Cache, Change, Key, key_of
from penstock.kube.client import PODS, Object

Query = tuple[str, str]
"""Namespace and label selector."""


class PoolPods:
    """Watches what the pools of the moment select.

    Args:
        api: The API server.
        wake: Called after each change; must not block.
    """

    def __init__(self, api: ApiClient, wake: Callable[[Change | asyncio.Task[None]], None]) -> None:
        self._api = api
        self._wake = wake
        self._caches: dict[Query, Cache] = {}
        self._last: dict[Key, tuple[Object, ...]] = {}
        """The pods of each pool that was ever listed: one whose selector changes keeps them until the new list is complete."""
        self.tasks: dict[Query, asyncio.Task[None]] = {}

    async def watch(self, pools: Iterable[Object]) -> None:
        """Watch the pods of these pools only."""
        wanted = {query_of(pool) for pool in pools}
        for query in self.tasks.keys() - wanted:
            self._caches.pop(query)
            await _ended(self.tasks.pop(query))
        for query in wanted - self.tasks.keys():
            namespace, selector = query
            cache = Cache(self._api, PODS, namespace=namespace, label_selector=selector, trim=trimmed_pod)
            cache.subscribe(self._wake)
            task = asyncio.create_task(self._run(cache), name=f"pods {namespace} {selector}")
            task.add_done_callback(self._wake)
            self._caches[query], self.tasks[query] = cache, task

    async def synced(self) -> None:
        """Waits for a complete list of every pool's pods."""
        for cache in list(self._caches.values()):
            await cache.synced.wait()

    def selected(self, pools: Iterable[Object]) -> dict[Key, tuple[Object, Sequence[Object]]]:
        """The pools with their pods, without those whose pods were never listed completely."""
        current: dict[Key, tuple[Object, ...]] = {}
        found: dict[Key, tuple[Object, Sequence[Object]]] = {}
        for pool in pools:
            key, cache = key_of(pool), self._caches.get(query_of(pool))
            listed = cache is not None and cache.synced.is_set()
            pods = tuple(cache.objects.values()) if cache is not None and listed else self._last.get(key)
            if pods is not None:
                current[key] = pods
                found[key] = pool, pods
        self._last = current
        return found

    async def close(self) -> None:
        """Ends all watches."""
        await asyncio.gather(*(_ended(task) for task in self.tasks.values()))

    async def _run(self, cache: Cache) -> None:
        synced = asyncio.create_task(self._tell(cache))
        try:
            await cache.run()
        finally:
            await _ended(synced)

    async def _tell(self, cache: Cache) -> None:
        """A selector without pods brings no change, and is complete all the same."""
        await cache.synced.wait()
        self._wake(Change(("", ""), None, None))


def query_of(pool: Object) -> Query:
    """What the pool selects. The API server has checked keys and values: none of them holds a comma or an equals sign."""
    chosen: Mapping[str, str] = pool["spec"]["selector"]["matchLabels"]
    return pool["metadata"]["namespace"], ",".join(f"{key}={value}" for key, value in sorted(chosen.items()))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
