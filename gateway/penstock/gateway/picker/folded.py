"""The prices of all replicas, folded: of each replica twelve numbers that no request changes, so that a request is priced at all
replicas in a few array operations.

Of `fresh` tokens that are not resident the cost of a replica is

    first + fresh · (eviction + crowding · first) + tokens of the horizon · itl
    first = base + fresh · prefill + capacity line + preemption line

A report or a booking changes the numbers of one replica, which are folded anew before the next pick; those of all of them are
when the common rates change. The causes themselves are stated in `penstock.gateway.picker.price`.
"""

from typing import Any

import numpy as np

from penstock.gateway.picker.compiled import CommonRates, Compiled
from penstock.gateway.picker.figures import Figures, Floats, Rates
from penstock.gateway.picker.price import EVICTION, Most, crowding, price

_LINES, _ITL, _EVICTION, _CROWDING = 3, 9, 10, 11
_FEW = 8
"""Changed rows up to which one after another is quicker than all at once."""


class Folded:
    """The numbers of all replicas of a model. Time is an argument (monotonic seconds).

    Args:
        compiled: What folds; None: Python.
    """

    def __init__(self, compiled: Compiled | None = None) -> None:
        self._compiled = compiled
        self.changed: set[int] = set()
        """Rows with changed figures."""
        self._table: Floats = np.zeros((_CROWDING + 1, 0))
        self._of: tuple[Rates, int] | None = None

    def table(self, figures: Floats, rates: Rates, block_size: int, now: float) -> Floats:
        """float64 [12, rows]: the slopes of three straight lines over the fresh tokens (capacity, preemption, the rest), where
        they begin, below what they do not fall; the inter-token time; what a fresh token costs others, and what it does for
        each second until the first token. All but the last and the inter-token time is by what the replica's promises have been
        worth.

        Args:
            figures: float64 [figures, rows], see `Figures`.
            rates: What the replicas show together; another object where rows have come or gone.
            block_size: Tokens in a block of the request's prompts.
            now: The age of reports counts from the last change of a row, or of the rates.
        """
        table, rows = self.due(figures, rates, block_size)
        if rows is None or rows:
            self._fold(figures, rates, block_size, now, rows)
        return table

    def due(self, figures: Floats, rates: Rates, block_size: int) -> tuple[Floats, list[int] | None]:
        """The table, and the rows that whoever asks must fold before anybody reads it; None: all of them."""
        if self._of is None or self._of[0] is not rates or self._of[1] != block_size or len(self.changed) > _FEW:
            self._of = rates, block_size
            self._table = np.empty((_CROWDING + 1, figures.shape[1]))
            self.changed.clear()
            return self._table, None
        if not self.changed:
            return self._table, []
        rows = list(self.changed)
        self.changed.clear()
        return self._table, rows

    def _fold(self, figures: Floats, rates: Rates, block_size: int, now: float, rows: list[int] | None) -> None:
        """Folds `rows` of the table anew; None: all."""
        if self._compiled is not None:
            self._compiled.fold(figures, common(rates), block_size, now, rows, self._table)
        elif rows is None:
            for number, values in enumerate(_fold(Figures(*figures), rates, block_size, now, np.maximum)):
                self._table[number] = values
        else:
            for row in rows:
                self._table[:, row] = _fold(Figures(*figures[:, row].tolist()), rates, block_size, now, max)


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
