"""The cost of a pick, rearranged: of each replica twelve numbers that no request changes, so that a request is priced in a few
array operations instead of the sixty that `penstock.gateway.picker.cost` takes to say what every part of it is.

Of `fresh` tokens that are not resident the cost of a replica is

    first + fresh · (eviction + crowding · first) + tokens of the horizon · itl
    first = base + fresh · prefill + max(capacity, least capacity) + max(preemption, 0)

where capacity and preemption are straight lines over `fresh`, too. A report or a booking changes the numbers of one replica,
which are worked out anew before the next pick; those of all of them are when the common rates are.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.gateway.picker.figures import PRIOR_QUEUE_S, Figures, Floats, Rates

GRACE_S = 2.0
"""A replica that answers is heard at least this often (the stream, or the poll that replaces it), so up to here a report is as
good as new."""
HALF_LIFE_S = 5.0
"""How long a report then takes to count half."""
ROWS_PER_STEP = 16.0
"""Decode rows that double the time of a step of one row: between a GPU, where steps hardly grow, and a CPU."""
KV_CLIFF = 0.9
"""KV usage from which on tokens are expected to be computed twice."""
EVICTION = 1.0
"""Seconds that others will lose for each second of this prefill, since a full cache forgets as much as it learns. By simulation
(`make bench-routing`): without it the hit rate falls by a tenth, with 2 nothing more is won."""
CROWDING = 2.0
"""How many wait longer for a prefill, over the number of those that come to its replica until its first token: these and, as they
bring work too, as many again until the replica is idle, if it works half of its time. By simulation
(`make bench-routing ARGS="--shapes"`): without it agents, whose calls share long prefixes, have their prefixes computed at every
replica until all of them are late; between 2 and 4 little changes."""
_LINES, _ITL, _EVICTION, _CROWDING = 3, 9, 10, 11
_FEW = 8
"""Changed rows up to which one after another is quicker than all at once."""
_NEVER = -1e12
"""Blocks that are missing where any number is free: finite, since it may be multiplied by nothing."""


class Folded:
    """The numbers of all replicas of a model. Time is an argument (monotonic seconds)."""

    def __init__(self) -> None:
        self.changed: set[int] = set()
        """Rows of which figures have changed."""
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
        if self._of is None or self._of[0] is not rates or self._of[1] != block_size or len(self.changed) > _FEW:
            self._of = rates, block_size
            table = self._table = np.empty((_CROWDING + 1, figures.shape[1]))
            for row, numbers in enumerate(_fold(Figures(*figures), rates, block_size, now, np.maximum)):
                table[row] = numbers
        else:
            for row in self.changed:
                one = Figures(*figures[:, row].tolist())
                self._table[:, row] = _fold(one, rates, block_size, now, max)
        self.changed.clear()
        return self._table


def costs(table: Floats, fresh: Floats, tokens: int, lora_s: Floats | None = None) -> Floats:
    """The cost of each row in seconds, float64 [rows].

    Args:
        table: See `Folded.table`.
        fresh: Prompt tokens that are not resident, by row.
        tokens: Output tokens whose inter-token time counts.
        lora_s: Seconds until the request's adapter is in a slot, by row; None where it names none.
    """
    lines = table[:_LINES] * fresh
    lines += table[_LINES : 2 * _LINES]
    np.maximum(lines, table[2 * _LINES : _ITL], out=lines)
    total = np.add.reduce(lines)
    if lora_s is not None:
        total += lora_s
    others = table[_CROWDING] * total
    others += table[_EVICTION]
    others *= fresh
    total += others
    total += tokens * table[_ITL]
    return total


def _fold(f: Any, rates: Rates, block_size: int, now: float, most: Callable[[Any, Any], Any]) -> tuple[Any, ...]:
    """The twelve numbers of one row, or of all: `f` holds figures, or columns of them; `most` is the greater of two."""
    trusted = 2.0 ** -(most(now - f.heard_at - GRACE_S, 0.0) / HALF_LIFE_S)
    running, held = most(f.running, 1.0), most(f.held_blocks, 1.0)
    s_per_token = f.s_per_token * f.correction
    assumed_s = most(rates.queue_s, PRIOR_QUEUE_S * (f.heard_at == -np.inf))
    booked, coming = f.booked_tokens + f.booked_transfers, f.waiting + f.booked_requests + 1
    # A row and KV blocks, as answers of average length end one after another.
    turn_s = trusted * rates.output_tokens * f.step_s * f.correction / running
    missing = most((f.backlog_tokens + booked) / block_size - f.blocks_free, _NEVER)
    # What decodes grows: by half an answer if it runs, by a whole one if it is yet to begin.
    room = f.kv_blocks * block_size
    again = trusted * s_per_token
    grown = booked + rates.output_tokens * (f.running / 2 + coming)
    some = room / most(room, 1.0)
    return (
        turn_s / (block_size * held),
        again * some,
        s_per_token,
        missing / held * turn_s,
        again * (some * grown + (f.kv_usage - KV_CLIFF) * room),
        f.correction * (trusted * queue_s(f, now, most) + (1 - trusted) * assumed_s) + s_per_token * f.booked_tokens,
        most(coming - f.rows_free, 0.0) * turn_s,
        0.0,
        -np.inf,
        trusted * itl_s(f, f.booked_requests, most) + (1 - trusted) * assumed_itl_s(rates, f.booked_requests),
        EVICTION * s_per_token,
        crowding(rates),
    )


def crowding(rates: Rates) -> float:
    """Seconds that others will wait longer for each token of a prefill and each second until its request's first one: at the
    common speed, so that a replica which reports too high a speed is not believed twice."""
    return CROWDING * rates.arrivals / max(rates.prefill_tokens_per_s, 1.0)


def queue_s(f: Any, now: float, most: Callable[[Any, Any], Any]) -> Any:
    """Seconds of prefill that are still to do of what a report told: it has been worked on since."""
    return most(f.backlog_tokens * f.s_per_token - (now - f.heard_at) / f.correction, 0.0)


def itl_s(f: Any, booked: Any, most: Callable[[Any, Any], Any]) -> Any:
    """Inter-token time of a batch of what runs and is booked and one more, by the step that was measured."""
    return f.step_s * (ROWS_PER_STEP + 1 + f.running + booked) / (ROWS_PER_STEP + most(f.batch, 1.0))


def assumed_itl_s(rates: Rates, booked: Any) -> Any:
    """The same of a replica of which nothing is known any more: as at the others."""
    return rates.itl_s * (ROWS_PER_STEP + 1 + booked) / (ROWS_PER_STEP + 1)
