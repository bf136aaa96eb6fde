"""What the event stream tells of the tiers behind the KV cache."""

from collections.abc import Iterable

from penstock.api.events import BlockStored, Medium
from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.connectors.tier_index import Key, TierIndex


class TierEvents:
    """The events of one tier. Group 0 speaks for all, as in the events of the KV cache.

    A page is told by the hash of its last token alone. Where a page of group 0 holds several hashes, those that read the stream
    could follow no prefix: nothing is told.
    """

    def __init__(self, kv: KVCacheManager, medium: Medium) -> None:
        self._events = kv.events
        self._medium: Medium = medium
        self._tells = kv.block_sizes[0] == kv.block_size
        if self._tells:
            self._events.has(medium)

    def changed(self, key: Key, found: bool) -> None:
        """The page can be found from now on, or no more."""
        if self._tells and key.group == 0:
            (self._events.stored if found else self._events.removed)(key.block_hash, self._medium)

    def snapshot(self, tier: TierIndex) -> Iterable[BlockStored]:
        """Return what the tier holds now, as the events before have said."""
        return [BlockStored([key.block_hash for key in tier.ready() if key.group == 0], self._medium)] if self._tells else []
