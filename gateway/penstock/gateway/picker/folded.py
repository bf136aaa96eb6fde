"""The prices of all replicas, folded: of each replica twelve numbers that no request changes, so that a request is priced at all
replicas in a few array operations.

Of `fresh` tokens that are not resident the cost of a replica is

    first + fresh · (eviction + crowding · first) + tokens of the horizon · itl
    first = base + fresh · prefill + capacity line + preemption line

A report or a booking changes the numbers of one replica, which are folded anew before the next pick; those of all of them are
when the common rates change. The causes themselves are stated in `penstock.gateway.picker.price`.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.compiled import CommonRates, Compiled
from penstock.gateway.picker.figures import Bools, Figures, Floats, Rates
from penstock.gateway.picker.price import EVICTION, Most, crowding, price

_LINES, _ITL, _EVICTION, _CROWDING = 3, 9, 10, 11
_FEW = 8
"""Changed rows up to which one after another is quicker than all at once."""


class Folding(Protocol):
    """The numbers of all replicas of a model. Time is an argument (monotonic seconds)."""

    def mark(self, row: int) -> None:
        """The figures in `row` have changed."""
        ...

    def table(self, rates: Rates, block_size: int, now: float) -> Floats:
        """float64 [12, rows]: the slopes of three straight lines over the fresh tokens (capacity, preemption, the rest), where
        they begin, below what they do not fall; the inter-token time; what a fresh token costs others, and what it does for
        each second until the first token. All but the last and the inter-token time is by what the replica's promises have been
        worth.

        Args:
            rates: What the replicas show together; another object where it has changed.
            block_size: Tokens in a block of the request's prompts.
            now: The age of reports counts from the last change of a row, or of the rates.
        """
        ...


class Folded:
    """See `Folding`.

    Args:
        figures: Those of the replicas, where they change. float64 [figures, rows].
    """

    def __init__(self, figures: Floats) -> None:
        self._figures = figures
        self._changed: set[int] = set()
        self._table = _blank(figures)
        self._of: tuple[Rates, int] | None = None

    def mark(self, row: int) -> None:
        """Keep the row among those that the next `table` folds anew."""
        self._changed.add(row)

    def table(self, rates: Rates, block_size: int, now: float) -> Floats:
        """See `Folding`: of a few changed rows those alone are folded, else all."""
        same = self._of is not None and self._of[0] is rates and self._of[1] == block_size
        if not same or len(self._changed) > _FEW:
            self._of = rates, block_size
            for number, values in enumerate(_fold(Figures(*self._figures), rates, block_size, now, np.maximum)):
                self._table[number] = values
        else:
            for row in self._changed:
                self._table[:, row] = _fold(Figures(*self._figures[:, row].tolist()), rates, block_size, now, max)
        self._changed.clear()
        return self._table


def folding(
    compiled: Compiled | None, figures: Floats, seeds: NDArray[np.uint64], may: Bools, rows: dict[ReplicaKey, int]
) -> Folding:
    """What folds these figures; see `Compiled.Folded` for the arguments."""
    if compiled is None:
        return Folded(figures)
    return compiled.Folded(figures, seeds, _blank(figures), may.tolist(), rows, _FEW, common)


def _blank(figures: Floats) -> Floats:
    return np.empty((_CROWDING + 1, figures.shape[1]))


def common(rates: Rates) -> CommonRates:
    """The rates as the compiled parts take them."""
    return rates.queue_s, rates.itl_s, rates.output_tokens, crowding(rates)


def first_s(table: Floats, fresh: Any) -> Floats:
    """Seconds to the first token in each row of `table`, without the wait for an adapter, by what the promises of each replica
    have been worth. float64 [rows].

    Args:
        table: See `Folded.table`; also some of its columns.
        fresh: Prompt tokens that are not resident, by row or alike in all.
    """
    lines = table[:_LINES] * fresh
    lines += table[_LINES : 2 * _LINES]
    np.maximum(lines, table[2 * _LINES : _ITL], out=lines)
    return lines[0] + lines[1] + lines[2]  # in this order whatever the number of rows


def costs(table: Floats, fresh: Floats, tokens: int, other_s: Floats | None = None) -> Floats:
    """The cost of each row in seconds, float64 [rows].

    Args:
        table: See `Folded.table`.
        fresh: Prompt tokens that are not resident, by row.
        tokens: Output tokens whose inter-token time counts.
        other_s: Seconds for its adapter and its images, by row; None where there are none.
    """
    total = first_s(table, fresh)
    if other_s is not None:
        total += other_s
    others = table[_CROWDING] * total
    others += table[_EVICTION]
    others *= fresh
    total += others
    total += tokens * table[_ITL]
    return total


def _fold(f: Any, rates: Rates, block_size: int, now: float, most: Most) -> tuple[Any, ...]:
    """The twelve numbers of one row, or of all: `f` holds figures, or columns of them; `most` is the greater of two."""
    of, worth = price(f, rates, block_size, now, most), f.correction
    capacity, preemption, s_per_token = of.capacity, of.preemption, worth * f.s_per_token
    return (
        worth * capacity.per_token,
        worth * preemption.per_token,
        s_per_token,
        worth * capacity.base,
        worth * preemption.base,
        worth * (of.queue_s + of.booked_s + of.uncertainty_s),
        worth * capacity.least,
        preemption.least,
        -np.inf,
        of.itl_s,
        EVICTION * s_per_token,
        crowding(rates),
    )
