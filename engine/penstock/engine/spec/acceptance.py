"""How likely drafts are accepted: by row, by the length of their proposal, and of a request that nothing is known of."""

from collections.abc import Sequence
from typing import Final

_SHARED: Final = 0.02
"""Weight of a draft in the acceptance that a new request is believed to have."""
_OF_LENGTH: Final = 0.05
"""Weight of a draft in the acceptance of as short a proposal."""
_WEIGHT: Final = 0.15
"""Of a draft in a row's acceptance."""
_STEPS: Final = 100
"""From 0 to 1: what a draft gains is looked up."""
_RETURN: Final = 0.01
"""How far a row's acceptance goes back to what new requests have, in a step without drafts."""

Chances = list[float]
"""How likely drafts of a row are accepted, one after the other."""


class Acceptance:
    """Of each row, the share of its drafts that are accepted where those before them are.

    It reckons with Python's numbers: of one row and four drafts, NumPy's operations took a twentieth of a small model's step.

    Args:
        max_num_seqs: Rows.
        num_drafts: K, drafts of a row at most.
        hope: What is believed before anything is known.
    """

    def __init__(self, max_num_seqs: int, num_drafts: int, hope: float) -> None:
        self._most, self._hope = num_drafts, hope
        self._of_row = [hope] * max_num_seqs
        """[rows]: of proposals of K drafts."""
        self._of_length = [hope] * num_drafts
        """By the drafts of a shorter one, of any row. It rests on less text: where whole ones are nearly always right, a single
        draft may nearly always be wrong."""
        self._proposed = [num_drafts] * max_num_seqs
        """[rows]: drafts of the last proposal that was not declined."""
        self._usual = hope
        self.judged = 0.0
        """Drafts whose acceptance is known, as far as it is not forgotten."""
        self._chances = [[(step / _STEPS) ** place for place in range(1, num_drafts + 1)] for step in range(_STEPS + 1)]
        """By acceptance."""
        self._remembered = [(1 - _WEIGHT) ** judged for judged in range(num_drafts + 1)]
        """By the number of drafts that were judged: weight of what was known of a row before."""

    def admit(self, row: int) -> None:
        """Another request has the row."""
        self._of_row[row] = self._usual

    def proposed(self, rows: Sequence[int], proposed: Sequence[int]) -> None:
        """Takes in of how many drafts the proposals are, whose acceptance is observed next."""
        for row, has in zip(rows, proposed, strict=True):
            self._proposed[row] = has

    def observe(self, rows: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Takes in, of each of these rows, the drafts that were verified, and how many of them were accepted."""
        total = agreed = 0
        for row, has, good in zip(rows, drafted, accepted, strict=True):
            # A draft after a rejected one says nothing.
            if not (judged := min(good + 1, has)):
                continue
            self.judged += judged
            if (proposed := self._proposed[row]) < self._most:
                self._of_length[proposed] += (1 - (1 - _OF_LENGTH) ** judged) * (good / judged - self._of_length[proposed])
                continue
            known = self._remembered[judged]
            self._of_row[row] = known * self._of_row[row] + (1 - known) * good / judged
            total, agreed = total + judged, agreed + good
        if total:
            weight = 1 - (1 - _SHARED) ** total
            self._usual += weight * (agreed / total - self._usual)

    def forget(self, rows: Sequence[int], share: float, steps: int) -> None:
        """Goes back to what was hoped by some of the way, and of these rows, after so many steps without drafts, to what is
        usual."""
        self._usual += share * (self._hope - self._usual)
        self._of_length = [known + share * (self._hope - known) for known in self._of_length]
        self.judged -= share * self.judged
        for row in rows:
            self._of_row[row] += min(_RETURN * steps, 1) * (self._usual - self._of_row[row])

    def of_new(self) -> Chances:
        """Of K drafts of a new request."""
        return self._at(self._usual)

    def of_whole(self, rows: Sequence[int]) -> list[Chances]:
        """Of K drafts of each of these rows."""
        return [self._at(self._of_row[row]) for row in rows]

    def of_next(self, rows: Sequence[int], proposed: Sequence[int], usable: Sequence[int]) -> list[Chances]:
        """Of proposals of so many drafts of each of these rows, of those that are of use."""
        return [
            self._at(self._of_row[row] if has == self._most else self._of_length[has])[:useful]
            for row, has, useful in zip(rows, proposed, usable, strict=True)
        ]

    def _at(self, acceptance: float) -> Chances:
        return self._chances[int(_STEPS * acceptance)]
