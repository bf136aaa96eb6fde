"""Has the ranks move pages between the host's memory and the disk, beside the steps."""

from penstock.engine.connectors.disk_tier import DiskTier
from penstock.engine.connectors.moves import Moved, PageFile
from penstock.engine.core.executor import Executor


class DiskPump:
    """Between the tier and the ranks.

    Args:
        tier: Says what is to be moved.
        executor: Of the ranks.
    """

    def __init__(self, tier: DiskTier, executor: Executor) -> None:
        self._tier = tier
        self._executor = executor
        self._heard: dict[int, list[Moved]] = {}

    @property
    def is_moving(self) -> bool:
        """Whether `pump` has something to do."""
        return self._tier.is_moving

    def open(self, now: float) -> None:
        """Opens the folder of the weights that are loaded; `ConfigError` where that cannot be."""
        self.pump(now)  # what is due belongs to the folder before
        ranks: list[list[PageFile]] = self._executor.call("open_disk")
        everywhere = set(ranks[0]).intersection(*ranks[1:])
        self._tier.open(page for page in ranks[0] if page in everywhere)

    def pump(self, now: float) -> None:
        """Has moves begun that are due, and takes in those that have ended."""
        if moves := self._tier.take(now):
            self._executor.call_beside("move_pages", moves)
        if not self._tier.is_moving:
            return
        ranks: list[dict[int, Moved]] = self._executor.call_beside("take_moved")
        for number, moved in [it for told in ranks for it in told.items()]:
            heard = self._heard.setdefault(number, [])
            heard.append(moved)
            if len(heard) == len(ranks):
                del self._heard[number]
                error = next((it.error for it in heard if it.error is not None), None)
                self._tier.moved(number, Moved(max(it.seconds for it in heard), error), now)
