"""Has the ranks move pages between the host's memory and what lies behind it, beside the steps."""

from collections.abc import Sequence

from penstock.engine.connectors.lower_tier import LowerTier
from penstock.engine.connectors.moves import Moved, PageFile
from penstock.engine.core.executor import Executor


class LowerPump:
    """Between the tier and the ranks.

    Args:
        tier: Says what is to be moved.
        executor: Of the ranks.
        keepers: Those that move pages.
    """

    def __init__(self, tier: LowerTier, executor: Executor, keepers: Sequence[int] = (0,)) -> None:
        self._tier = tier
        self._executor = executor
        self._keepers = keepers
        self._heard: dict[int, list[Moved]] = {}

    @property
    def is_moving(self) -> bool:
        """Whether `pump` has something to do."""
        return self._tier.is_moving

    def open(self, now: float) -> None:
        """Opens the place for pages of the weights that are loaded; `ConfigError` where that cannot be."""
        self.pump(now)  # what is due belongs to the place before
        ranks: list[list[PageFile]] = self._executor.call("open_lower", self._tier.name)
        first, *others = [ranks[keeper] for keeper in self._keepers]
        everywhere = set(first).intersection(*others)
        self._tier.open(page for page in first if page in everywhere)

    def pump(self, now: float) -> None:
        """Has moves begun that are due, and takes in those that have ended."""
        if moves := self._tier.take(now):
            self._executor.call_beside("move_pages", self._tier.name, moves)
        if not self._tier.is_moving:
            return
        ranks: list[dict[int, Moved]] = self._executor.call_beside("take_moved", self._tier.name)
        for number, moved in [it for told in ranks for it in told.items()]:
            heard = self._heard.setdefault(number, [])
            heard.append(moved)
            if len(heard) == len(self._keepers):
                del self._heard[number]
                error = next((it.error for it in heard if it.error is not None), None)
                everywhere = set(heard[0].found).intersection(*(it.found for it in heard[1:]))
                found = [page for page in heard[0].found if page in everywhere]
                self._tier.moved(number, Moved(max(it.seconds for it in heard), error, found), now)
