"""What replicas hold behind their KV caches: blocks in host memory, on disks and in stores, as their events say.

A prefix may begin in the KV cache and go on in a tier, or be in both by turns. So for each tier an index holds what its replica
can find there or nearer: the longest prefix in that index, less the longest in the one before, is what would be loaded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.api.events import MEDIA, Medium
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.residency.index import MAX_BLOCKS, MAX_BLOCKS_PER_REPLICA, ResidencyIndex

PRIOR_COSTS: dict[Medium, float] = {"memory": 0.1, "disk": 0.5, "store": 0.3, "object": 0.5}
"""A load's time as a share of the time to compute the same tokens, while a replica has not measured either."""


def load_cost(medium: Medium, report: LoadReport | None) -> float:
    """Return a load's time as a share of the time to compute the same tokens; from 1 on, an engine computes them.

    Args:
        medium: Where the tokens' KV is.
        report: The replica's; None: there is none yet.
    """
    speed = 0.0 if report is None else float(getattr(report, f"{medium}_tier_tokens_per_s"))
    if report is None or not speed or not report.prefill_tokens_per_s:
        return PRIOR_COSTS[medium]
    return report.prefill_tokens_per_s / speed


class Tiers:
    """Residency in the tiers of all replicas.

    Args:
        cached: What the KV caches hold. It hears of each event first.
        make_index: Makes an empty index.
        per_replica: Blocks known of one tier of one replica at most.
        total: Blocks known of all replicas at most, of caches and tiers together.
    """

    def __init__(
        self,
        cached: ResidencyIndex,
        make_index: Callable[[], ResidencyIndex],
        per_replica: int = MAX_BLOCKS_PER_REPLICA,
        total: int = MAX_BLOCKS,
    ) -> None:
        self._cached = cached
        self._make_index = make_index
        self._per_replica = per_replica
        self._total = total
        self._held: dict[ReplicaKey, dict[Medium, set[bytes]]] = {}
        self._listed = 0
        """Blocks in `_held`."""
        self._within: dict[Medium, ResidencyIndex] = {}
        """By tier, what can be found in it, in the tiers before it or in the KV cache."""

    def __bool__(self) -> bool:
        """Whether any replica has a tier."""
        return bool(self._within)

    def indexes(self) -> Iterator[tuple[Medium, ResidencyIndex]]:
        """Return the tiers that any replica has, the nearest first, with what can be found within each."""
        return ((medium, self._within[medium]) for medium in MEDIA if medium in self._within)

    def stored(self, key: ReplicaKey, hashes: Sequence[bytes], medium: Medium | None) -> None:
        """`key` has these blocks in `medium` now; None: in its KV cache."""
        if medium is not None:
            held = self._held.setdefault(key, {}).setdefault(medium, set())
            if medium not in self._within:
                self._within[medium] = self._make_index()
                self._divide()
            before = len(held)
            hashes = hashes[: max(0, min(self._per_replica - before, len(self._within) * self._part - self._listed))]
            held.update(hashes)
            self._listed += len(held) - before
        for within in self._at_or_behind(key, medium):
            self._within[within].store(key, hashes)

    def removed(self, key: ReplicaKey, hashes: Sequence[bytes], medium: Medium | None) -> None:
        """`key` has these blocks no more in `medium`; None: in its KV cache."""
        held = self._held.get(key)
        if held is None:
            return
        if medium is not None and medium in held:
            before = len(held[medium])
            held[medium].difference_update(hashes)
            self._listed += len(held[medium]) - before
        left = [block for block in hashes if not self._cached.holds(key, block)]
        for within in MEDIA:
            if within in held:
                left = [block for block in left if block not in held[within]]
                self._within[within].remove(key, left)

    def clear(self, key: ReplicaKey) -> None:
        """No block of `key` is known any more."""
        for medium, blocks in self._held.get(key, {}).items():
            self._listed -= len(blocks)
            blocks.clear()
            self._within[medium].clear(key)

    def drop(self, key: ReplicaKey) -> None:
        """`key` is gone."""
        for medium, blocks in self._held.pop(key, {}).items():
            self._listed -= len(blocks)
            self._within[medium].drop(key)
            if not any(medium in held for held in self._held.values()):
                del self._within[medium]
                self._divide()

    def sweep(self, limit: int) -> None:
        """Forgets up to `limit` blocks of each tier that emptied replicas have left."""
        for index in self._within.values():
            index.sweep(limit)

    @property
    def _part(self) -> int:
        """The share of the total of each index. What a tier holds is listed besides, and takes as much."""
        return self._total // (1 + 2 * len(self._within))

    def _divide(self) -> None:
        for index in (self._cached, *self._within.values()):
            index.set_total(self._part)

    def _at_or_behind(self, key: ReplicaKey, medium: Medium | None) -> Iterable[Medium]:
        held = self._held.get(key, {})
        return held if medium is None else [other for other in MEDIA[MEDIA.index(medium) :] if other in held]
