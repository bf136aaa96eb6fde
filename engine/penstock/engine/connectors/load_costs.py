"""Whether pages are loaded or their tokens computed: whichever has been faster of late.

Computing takes time for each token and for each that it attends to. A load takes a fixed time and one for each page. All of it is
learned from the steps and loads before. So a short prefix is computed and a long one loaded.
"""

from collections.abc import Callable
from typing import Final, get_args

from penstock.engine.connectors.moves import Lower

_KEEP: Final = 0.9
"""Weight of what is known beside the next load."""
FORGET_S: Final = 60.0
"""A time that old says nothing any more: the next load is tried."""


class TierLoads:
    """What loads from one tier take, by the number of pages: a line through the loads before, where newer ones weigh more."""

    def __init__(self) -> None:
        self.declined_tokens = 0
        """Tokens that were computed, although their pages are here."""
        self._count = self._pages = self._seconds = self._squares = self._products = 0.0
        self._observed_at = -FORGET_S

    def observe(self, pages: int, seconds: float, now: float) -> None:
        """Takes in a load of `pages` that has ended at `now` after `seconds`; `now` is Unix time."""
        keep = _KEEP if self._is_fresh(now) else 0.0
        self._observed_at = now
        self._count = keep * self._count + 1
        self._pages = keep * self._pages + pages
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + pages * pages
        self._products = keep * self._products + pages * seconds

    def seconds(self, pages: int, now: float) -> float | None:
        """Return what a load of `pages` would take; None: unknown."""
        if (line := self.line(now)) is None:
            return None
        if self._is_of_one_size:
            # That does not tell the fixed part from the other: the better case, so that another size is tried.
            return self._seconds / self._count * min(1.0, pages * self._count / self._pages)
        fixed, each = line
        return fixed + each * pages

    def line(self, now: float) -> tuple[float, float] | None:
        """Return the seconds that a load takes whatever its size, and those that each page adds; None: unknown. Of loads of one
        size all counts as the pages'."""
        if not self._is_fresh(now):
            return None
        mean_pages, mean = self._pages / self._count, self._seconds / self._count
        if self._is_of_one_size:
            return 0.0, mean / mean_pages
        each = max(0.0, (self._products / self._count - mean_pages * mean) / self._spread)
        return max(0.0, mean - each * mean_pages), each

    def pages_per_s(self, now: float) -> float:
        """Return how fast pages have come of late, the fixed time of a load included; 0: unknown."""
        return self._pages / self._seconds if self._is_fresh(now) and self._seconds else 0.0

    @property
    def _spread(self) -> float:
        return self._squares / self._count - (self._pages / self._count) ** 2

    @property
    def _is_of_one_size(self) -> bool:
        return self._spread < 0.01 * (self._pages / self._count) ** 2

    def _is_fresh(self, now: float) -> bool:
        return 0 <= now - self._observed_at < FORGET_S


class LoadCosts:
    """What loads take, and the choice between loading and computing.

    Args:
        saved_s: Seconds that a request saves if it need not compute some tokens: by the tokens before those, their number, and
            the tokens behind them that it computes in any case; None while unknown. None instead of it: every load pays.
    """

    def __init__(self, saved_s: Callable[[int, int, int], float | None] | None = None) -> None:
        self.memory = TierLoads()
        self.lower: dict[Lower, TierLoads] = {name: TierLoads() for name in get_args(Lower)}
        self._saved_s = saved_s

    def pays(self, start: int, tokens: int, rest: int, pages: int, now: float, lower: Lower | None = None) -> bool:
        """Whether loading is faster than computing, or one of the two is unknown.

        Args:
            start: Tokens before those.
            tokens: That need not be computed then.
            rest: Tokens behind those that must be.
            pages: With these tokens.
            now: Unix time in seconds.
            lower: The tier from which they come into the host's memory, and from there; None: from there alone.
        """
        if self._saved_s is None:
            return True
        saved_s = self._saved_s(start, tokens, rest)
        tiers = [self.memory] if lower is None else [self.lower[lower], self.memory]
        found = [tier.seconds(pages, now) for tier in tiers]
        known = [it for it in found if it is not None]
        if saved_s is None or len(known) < len(found) or sum(known) <= saved_s:
            return True
        tiers[0].declined_tokens += tokens
        return False
