"""The same resource in several namespaces: a watch in each, so that no right is needed beyond them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kubernetes.aio.client import ApiClient

from penstock.kube.cache import Cache, Change, trimmed
from penstock.kube.client import Object, Resource
from penstock.kube.groups import Groups


class Caches:
    """A `Cache` for each namespace, or a single one for all."""

    def __init__(
        self,
        api: ApiClient,
        resource: Resource,
        namespaces: Sequence[str],
        *,
        label_selector: str = "",
        trim: Callable[[Object], Object] = trimmed,
        optional: Groups | None = None,
    ) -> None:
        """
        Args:
            namespaces: None named: all.
            label_selector, trim, optional: See `Cache`.
        """
        self._parts = [
            Cache(api, resource, namespace=namespace, label_selector=label_selector, trim=trim, optional=optional)
            for namespace in namespaces or (None,)
        ]

    def values(self) -> Iterator[Object]:
        """All objects in the caches, read-only."""
        return chain.from_iterable(part.objects.values() for part in self._parts)

    def subscribe(self, callback: Callable[[Change], None]) -> None:
        """Calls back for every change from now on."""
        for part in self._parts:
            part.subscribe(callback)

    def on_presence(self, callback: Callable[[], None]) -> None:
        """Calls back whenever the server comes to know the resource, or knows it no longer."""
        for part in self._parts:
            part.on_presence(callback)

    @property
    def absent(self) -> bool:
        """Whether the server does not know the resource, as far as a namespace has found out."""
        return any(part.absent for part in self._parts)

    async def synced(self) -> None:
        """Returns after the first complete list of each namespace."""
        for part in self._parts:
            await part.synced.wait()

    async def answered(self) -> None:
        """Returns when each namespace has been listed, or the server has said that it will not be."""
        for part in self._parts:
            await part.answered.wait()

    async def run(self) -> None:
        """Keeps all current until cancelled."""
        await asyncio.gather(*(part.run() for part in self._parts))
