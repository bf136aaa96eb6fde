"""Adapters by name: what requests can ask for, and what becomes of the cache and of requests when that changes."""

from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.core.scheduling.lora.adapter import Adapter
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable
from penstock.engine.core.scheduling.request import Request
from penstock.engine.messages import AdapterInfo


class Adapters:
    """The adapters of one scheduler.

    Args:
        table: Their locations.
        kv: The cache of their requests.
    """

    def __init__(self, table: AdapterTable, kv: KVCacheManager) -> None:
        self.table = table
        self._kv = kv
        self._requests: dict[int, Request] = {}
        """Live ones with an adapter, by index."""
        self._named: dict[str, Adapter] = {}
        self._replaced: dict[int, str] = {}
        """Names of those in whose place others have come."""
        self._last_id = 0

    def find(self, name: str) -> AdapterInfo | None:
        """What requests get under a name."""
        adapter = self._named.get(name)
        return None if adapter is None else adapter.info

    def serving(self, lora_id: int) -> Adapter | None:
        """What takes requests under this number: of one that was replaced, what has its name now; frontends learn it later."""
        adapter = self.table.get(lora_id)
        return adapter or self._named.get(self._replaced.get(lora_id, ""))

    def names(self) -> tuple[str, ...]:
        """What requests can ask for, in the order in which it came."""
        return tuple(self._named)

    def infos(self) -> list[AdapterInfo]:
        """All that requests can ask for, in the order in which they came."""
        return [adapter.info for adapter in self._named.values()]

    def add(self, name: str, uri: str, revision: str | None) -> AdapterInfo:
        """Begins to read an adapter, which `publish` names."""
        self._last_id += 1
        info = AdapterInfo(self._last_id, name, uri, revision)
        self.table.add(info)
        return info

    def publish(self, info: AdapterInfo) -> None:
        """Lets requests ask for an adapter that has been read; one that has the name is unloaded."""
        if (before := self._named.get(info.name)) is not None:
            self._replaced[before.info.lora_id] = info.name
            self.remove(info.name)
        adapter = self.table.get(info.lora_id)
        assert adapter is not None, "what was read is there"
        self._named[info.name] = adapter

    def discard(self, info: AdapterInfo) -> None:
        """Drops an adapter that could not be read and was never published."""
        adapter = self.table.get(info.lora_id)
        assert adapter is not None, "it takes no requests"
        self.table.retire(adapter)

    def remove(self, name: str) -> None:
        """Unloads an adapter: its requests go on to their end, and what the cache holds of it is forgotten, since another one may
        come under its name. Raises `KeyError` where there is none."""
        adapter = self._named.pop(name)
        mine = [request for request in self._requests.values() if request.adapter is adapter]
        for request in mine:
            adapter.published.update(request.block_hashes)
            request.rename_chain(f"{name}\0{adapter.info.lora_id}")
        self._forget_blocks(adapter)
        self.table.retire(adapter)

    def joined(self, request: Request) -> None:
        """A request with an adapter has come."""
        assert request.adapter is not None
        self._requests[request.index] = request
        self.table.joined(request.adapter)

    def left(self, request: Request) -> None:
        """Record that a request with an adapter has ended."""
        assert request.adapter is not None
        del self._requests[request.index]
        self.table.left(request.adapter)

    def note_weights(self, adapter: Adapter, digests: tuple[bytes, ...]) -> bool:
        """Takes in what has been read of an adapter that nothing runs with; False: it is not what was read before. What the cache
        holds of it is forgotten then. Its preempted requests go on with the new weights.

        Args:
            adapter: It.
            digests: Of its weights, by rank.
        """
        same = adapter.digests in ((), digests)
        adapter.digests = digests
        if not same:
            self._forget_blocks(adapter)
        return same

    def _forget_blocks(self, adapter: Adapter) -> None:
        self._kv.forget(adapter.published)
        adapter.published.clear()

    def note_blocks(self, request: Request) -> None:
        """A request gives its blocks back, which the cache may keep."""
        adapter = request.adapter
        assert adapter is not None, "the request has one"
        adapter.published.update(request.block_hashes)
        if len(adapter.published) > 2 * self._kv.num_places:
            adapter.published.intersection_update(self._kv.names())
