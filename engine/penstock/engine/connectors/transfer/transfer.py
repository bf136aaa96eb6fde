"""The scheduler's half of the transfer between replicas."""

from collections.abc import Sequence

from penstock.engine.cache.kv_manager import CachedSequence, CacheHit, KVCacheManager
from penstock.engine.config import TransferConfig
from penstock.engine.connectors.tier_index import Key, TierIndex
from penstock.engine.connectors.transfer.leases import Leases
from penstock.engine.connectors.transfer.pulls import Pulls
from penstock.engine.connectors.transfer.words import Errand, News
from penstock.engine.messages import Lent, RemotePrefix
from penstock.engine.stats import TransferStats


class Transfer:
    """Lends pages of the host's memory, and reads those of other replicas into it.

    Args:
        config: The replica's.
        kv: The cache, which knows what blocks a prefix needs.
        host: The pages.
        page_bytes: Of a page, on each rank.
        ranks: That read pages.
    """

    def __init__(self, config: TransferConfig, kv: KVCacheManager, host: TierIndex, page_bytes: int, ranks: int) -> None:
        self._kv = kv
        self._host = host
        self._config = config
        self.leases = Leases(host, config.lease_s)
        self.pulls = Pulls(host, page_bytes, ranks)
        self.engine_id = config.engine_id
        self.fingerprint = ""
        """What decides about the bytes of the pages; set when the weights are known."""
        self.hosts = list[str]()
        """By part of pages, where it is lent; set with the fingerprint."""

    @property
    def awaits_news(self) -> bool:
        """Whether a rank may have heard something."""
        return self.pulls.is_moving or self.leases.num_leases > 0

    @property
    def is_moving(self) -> bool:
        """Whether a step should look for news soon."""
        return self.leases.is_due or self.pulls.is_moving

    def problem(self, request: CachedSequence, num_tokens: int, remote: RemotePrefix) -> str | None:
        """Why pages of another replica are of no use for a request with that many prompt tokens; None: they are."""
        if remote.fingerprint != self.fingerprint:
            return (
                f"remote_fingerprint {remote.fingerprint} is not {self.fingerprint}: the other replica has other weights, "
                "dtypes, layout, stages or version"
            )
        if not 0 < remote.num_tokens < num_tokens or remote.num_tokens % self._kv.block_size:
            return (
                f"remote_num_tokens is {remote.num_tokens}; it must be whole blocks of {self._kv.block_size} tokens, and fewer "
                f"than the prompt's {num_tokens}"
            )
        _, needed = self._kv.elsewhere(request, remote.num_tokens + 1, self._nothing(), lambda group, name: True)
        expected = [sum(group == number for group, _, _ in needed) for number in range(self._kv.num_groups)]
        if remote.num_blocks != expected:
            return f"remote_block_ids has {remote.num_blocks} blocks by group, and {remote.num_tokens} tokens need {expected}"
        return None

    def needed(self, request: CachedSequence, num_tokens: int) -> list[tuple[int, int, bytes]]:
        """What another replica needs to begin where a prompt's last whole block ends: (group, place in its table, name)."""
        return self._kv.elsewhere(request, num_tokens, self._nothing(), lambda group, name: True)[1]

    def lend(self, request: CachedSequence, num_tokens: int) -> Lent | None:
        """Lends a prompt's prefix as far as its pages are in the host's memory or on their way there; None: nothing is."""
        if not self._config.lends:
            return None
        has = self._host.knows
        upto, pages = self._kv.elsewhere(request, num_tokens, self._nothing(), lambda group, name: has(Key(group, name)))
        if not pages:
            return None
        lease, slots = self.leases.hold([Key(group, name) for group, _, name in pages])
        blocks: list[list[int]] = [[] for _ in range(self._kv.num_groups)]
        for (group, _, _), slot in zip(pages, slots, strict=True):
            blocks[group].append(slot)
        return Lent(lease, upto, blocks, self.fingerprint, self.engine_id, self.hosts, self._config.port)

    def take(self, now: float) -> list[Errand]:
        """What the ranks must do now; `now` is Unix time in seconds. See `Leases.take`."""
        return self.leases.take(now) + self.pulls.take(now)

    def heard(self, news: Sequence[News], now: float) -> None:
        """What each rank tells."""
        for told in news:
            for name in told.renewed:
                self.leases.renewed(name, now)
            for name, readers in told.released:
                self.leases.released(name, readers)
            for number, how in told.pulled.items():
                self.pulls.pulled(number, how, now)

    def clear(self) -> None:
        """The content is another one from now on: nothing of it is lent."""
        self.leases.clear()

    def stats(self) -> TransferStats:
        """Return the state, and totals since the start."""
        return TransferStats(
            leases=self.leases.num_leases,
            leased_pages=self.leases.num_pages,
            expired_leases=self.leases.num_expired,
            pulls=self.pulls.num_pulls,
            pulled_bytes=self.pulls.num_bytes,
            pull_s=self.pulls.seconds,
            failed_pages=self.pulls.num_failed_pages,
        )

    def _nothing(self) -> CacheHit:
        return CacheHit(0, [[] for _ in range(self._kv.num_groups)])
