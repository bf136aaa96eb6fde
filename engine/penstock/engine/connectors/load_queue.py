"""Pages on their way from the host's memory into the KV cache: some in each step, so that those who decode hardly notice."""

import math
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from penstock.engine.cache.pins import Owner
from penstock.engine.connectors.tier_index import Key
from penstock.engine.core.measure.copies import CopyPace
from penstock.engine.core.scheduling.request import Request

_LEAST: Final = 0.25
"""Of the time of a step, that copies beside those who decode take at a time, or more: whether they hold it up must show."""
_PRIOR_BYTES_PER_S: Final = 1e9
"""Until a copy has been timed."""
_MOST_OWED_S: Final = 0.1
"""What copies that took too long cost those that come after: a machine that stood still meanwhile must not keep them waiting."""


class Load(msgspec.Struct, eq=False):
    """What one request waits for."""

    request: Request
    began: float
    """Unix time in seconds."""
    upto: int
    """Tokens whose KV is in the cache afterwards."""
    external: int
    """Tokens among those that come from host memory."""
    keys: list[Key]
    slots: list[int]
    blocks: list[int]
    sent: int = 0
    """Pages that are in plans, or were."""
    under_way: int = 0
    """Plans with some of them that have not retired."""
    ok: bool = True
    """Whether no such plan has failed."""

    @property
    def owner(self) -> Owner:
        return Owner("load", self.request.index)

    @property
    def is_over(self) -> bool:
        return not self.under_way and (self.sent == len(self.blocks) or not self.ok)


class Part(NamedTuple):
    """The pages of a load that go with one plan."""

    load: Load
    slots: list[int]
    blocks: list[int]
    charged_s: float
    """Seconds that its copies are expected to take beside those who decode; 0: they are beside nobody."""


class LoadQueue:
    """Loads in the order in which they began.

    Args:
        page_bytes: Of a page.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._due: deque[Load] = deque()
        self._pages = 0
        self._saved_s = math.inf
        """Seconds of copies that have not been made beside the steps that could have borne them."""
        self.seconds = 0.0
        """That copies have taken."""

    @property
    def is_due(self) -> bool:
        """Whether the next plan has something to copy."""
        return bool(self._due)

    def add(self, load: Load) -> None:
        """Has its pages copied with the next plans."""
        self._due.append(load)

    def take(self, pace: CopyPace) -> list[Part]:
        """Return what goes with the next plan, beside which copies have that pace."""
        (room, page_s), parts = self._room(pace), list[Part]()
        while room and self._due:
            load = self._due[0]
            these = slice(load.sent, load.sent + room)
            blocks = load.blocks[these]
            part = Part(load, load.slots[these], blocks, page_s * len(blocks))
            parts.append(part)
            self._saved_s -= part.charged_s
            room -= len(part.blocks)
            load.sent += len(part.blocks)
            load.under_way += 1
            if load.sent == len(load.blocks):
                self._due.popleft()
        return parts

    def retired(self, parts: Iterable[Part], seconds: float | None) -> list[Load]:
        """Return the loads that are over with the plan of these parts; `seconds` of its copies: None where it failed."""
        over = list[Load]()
        charged_s = 0.0
        for load, _, blocks, expected_s in parts:
            charged_s += expected_s
            load.under_way -= 1
            if seconds is not None:
                self._pages += len(blocks)
            elif load.ok:
                load.ok = False
                if load.sent < len(load.blocks):
                    self._due.remove(load)
            if load.is_over:
                over.append(load)
        self.seconds += seconds or 0.0
        if charged_s:
            self._saved_s = max(self._saved_s + charged_s - (seconds or 0.0), -_MOST_OWED_S)
        return over

    def _room(self, pace: CopyPace) -> tuple[int, float]:
        """Pages that may go with a step, and the seconds that each is charged."""
        if not pace.step_s:
            return sum(len(load.blocks) for load in self._due), 0.0
        if not pace.share:
            return 0, 0.0
        least, most = _LEAST * pace.step_s, max(pace.share, _LEAST) * pace.step_s
        self._saved_s = min(self._saved_s + pace.share * pace.step_s, most)
        if self._saved_s < least:
            return 0, 0.0
        timed = self.seconds / self._pages if self._pages else 0.0
        page_s = timed or self._page_bytes / _PRIOR_BYTES_PER_S
        # A page that takes longer is made up for by the steps that follow.
        return max(1, int(self._saved_s / page_s)), page_s
