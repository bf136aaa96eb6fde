"""Questions to a shared store: which pages of a request's prefix does it have? The request waits for the answer.

Other replicas store there at any time and the store evicts what it likes, so a list of its pages would be old at once.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.engine.connectors.tier_index import Key

PATIENCE_S: Final = 1.0
"""That a request waits for an answer."""
SHUT_S: Final = 30.0
"""Without questions, after one was not answered in time: a store that hangs holds up one request, not each."""
SLOW_S: Final = 1.0
"""A read that fails after so long says that the store hangs; one that fails sooner, that it has lost a page."""


class _Question(msgspec.Struct, frozen=True):
    index: int
    """Of the request."""
    asked: float
    """Unix time in seconds."""
    keys: list[Key]


class LookUps:
    """Questions that are open."""

    def __init__(self) -> None:
        self.num_failed = 0
        """Questions without an answer, or with one that came too late."""
        self._open: dict[int, _Question] = {}
        self._over: list[int] = []
        self._shut_until = 0.0

    def is_shut(self, now: float) -> bool:
        """Whether the store is left alone."""
        return now < self._shut_until

    def shut(self, now: float) -> None:
        """Leave the store alone for a while."""
        self._shut_until = now + SHUT_S

    def asked(self, number: int, index: int, keys: Sequence[Key], now: float) -> None:
        """A question is on its way, as the move `number`."""
        self._open[number] = _Question(index, now, list(keys))

    def answered(self, number: int, now: float, *, ok: bool) -> list[Key]:
        """The move has ended. Returns the pages that were asked for; none, where the request waits no more."""
        question = self._open.pop(number, None)
        if question is None:
            return []
        self._over.append(question.index)
        if not ok:
            self._failed(now)
        return question.keys

    def take_waits(self, now: float) -> list[int]:
        """Requests that need wait no longer."""
        for number in [number for number, it in self._open.items() if now >= it.asked + PATIENCE_S]:
            self._over.append(self._open.pop(number).index)
            self._failed(now)
        over, self._over = self._over, []
        return over

    def _failed(self, now: float) -> None:
        self.num_failed += 1
        self.shut(now)
