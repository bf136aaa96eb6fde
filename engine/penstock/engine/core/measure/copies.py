"""How much copies of pages hold up those who decode, and so how much may be copied beside a step. Pure."""

from typing import Final, NamedTuple

_SLOWER: Final = 0.02
"""By how much copies of pages may lengthen the steps of those who decode, on average."""
MOST_SHARE: Final = 0.5
"""Of the time of a step that such copies take at most: its rows shall not wait for them."""
_STEPS: Final = 32
"""With copies, over which is averaged what they hold up, exponentially."""
_BEFORE: Final = 4
"""Steps over which the time of those without copies is averaged: it grows with the answers, and changes with who decodes."""
_IN_A_ROW: Final = 16
"""Steps with copies until one goes without: what a step takes alone must stay known."""
_DOUBT: Final = 0.25
"""Of a step: copies that long are taken to have held it up by as much, before any has been timed."""


class CopyPace(NamedTuple):
    """How much may be copied beside steps."""

    step_s: float = 0.0
    """Seconds that the step takes; 0: unknown, or nobody is in it. All that is due may go with it then."""
    share: float = 1.0
    """Of the time of such steps that copies may take, on average; 0: none goes with this one."""


class CopyMeter:
    """Learns by how much copies hold up those who decode: from how much longer a step takes than those right before it."""

    def __init__(self) -> None:
        self._plain_s = 0.0
        self._in_a_row = 0
        self._copied = self._held_up = _DOUBT

    def observe(self, seconds: float, copied_s: float) -> None:
        """Takes in a step that only decodes.

        Args:
            seconds: That it took.
            copied_s: That copies took beside it.
        """
        if not copied_s:
            self._in_a_row = 0
            self._plain_s += (seconds - self._plain_s) / (_BEFORE if self._plain_s else 1)
        elif self._plain_s:
            self._in_a_row += 1
            keep = 1 - 1 / _STEPS
            # By no more than they took: what is beyond that has other reasons, as has what is below.
            held_up_s = min(max(seconds - self._plain_s, -copied_s), copied_s)
            self._copied = keep * self._copied + copied_s / self._plain_s
            self._held_up = keep * self._held_up + held_up_s / self._plain_s

    @property
    def share(self) -> float:
        """Of the time of a step with those who decode that copies may take: where a core is free, they hold up nobody."""
        if self._in_a_row >= _IN_A_ROW:
            return 0.0
        return min(MOST_SHARE, _SLOWER * self._copied / self._held_up) if self._held_up > 0 else MOST_SHARE
