"""The price of a request at a replica, in seconds: the one statement of it.

Every cause of a wait is a constant, or a straight line over the request's *fresh* tokens: those that are not resident at the
replica. So the lines of a replica stay the same until its figures change, whatever is asked: `penstock.gateway.picker.folded`
keeps them for picks, and `penstock.gateway.picker.cost` says what each cause contributes.

The functions take the figures of one replica with Python's `max`, or columns of figures with `np.maximum`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from penstock.gateway.picker.figures import PRIOR_QUEUE_S, Rates

GRACE_S = 2.0
"""A replica that answers is heard at least this often (the stream, or the poll that replaces it), so up to here a report is as
good as new."""
HALF_S = 5.0
"""After how long a report then counts half."""
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
_NEVER = -1e12
"""Blocks that are missing where any number is free: finite, since it may be multiplied by nothing."""

Most = Callable[[Any, Any], Any]
"""The greater of two."""


class Line(NamedTuple):
    """Seconds over fresh tokens."""

    per_token: Any
    base: Any
    least: Any

    def at(self, fresh: Any, most: Most) -> Any:
        """The seconds for so many fresh tokens."""
        return most(self.per_token * fresh + self.base, self.least)


class Price(NamedTuple):
    """What a request waits for at a replica, by cause, as the replica's own reports have it: without its correction."""

    queue_s: Any
    """Prefill that the replica reports as still to do."""
    booked_s: Any
    """Prefill of requests sent there that it has not reported yet."""
    uncertainty_s: Any
    """Queue assumed in place of what the report is too old to say."""
    capacity: Line
    """Waiting for rows or KV blocks."""
    preemption: Line
    """Expected recompute, where KV memory is nearly full."""
    itl_s: Any
    """Inter-token time with the request in the batch."""


def price(f: Any, rates: Rates, block_size: int, now: float, most: Most) -> Price:
    """The price at one replica, or at all.

    Args:
        f: `Figures` of numbers, or of columns.
        rates: What the replicas show together.
        block_size: Tokens in a block of the request's prompts.
        now: The age of reports counts from here.
        most: The greater of two.
    """
    aged = most(now - f.heard_at - GRACE_S, 0.0) / HALF_S
    trusted = 1 / (1 + aged * aged)  # no power: its last bit is another one in numpy's code for each CPU
    running, held = most(f.running, 1.0), most(f.held_blocks, 1.0)
    booked, coming = f.booked_tokens + f.booked_transfers, f.waiting + f.booked_requests + 1
    # A row and KV blocks for all that waits and for this request, as answers of average length end one after another. What waits
    # without such need waits for its turn, which is the queue's time and not counted again.
    turn_s = trusted * rates.output_tokens * f.step_s / running
    missing = most((f.backlog_tokens + booked) / block_size - f.blocks_free, _NEVER)
    # Preemptions compute again what is beyond what the KV memory holds well. What decodes grows: by half an answer if it runs, by
    # a whole one if it is yet to begin.
    room, again = f.kv_blocks * block_size, trusted * f.s_per_token
    some = room / most(room, 1.0)
    grown = booked + rates.output_tokens * (f.running / 2 + coming)
    return Price(
        queue_s=trusted * queue_s(f, now, most),
        booked_s=f.s_per_token * f.booked_tokens,
        uncertainty_s=(1 - trusted) * most(rates.queue_s, PRIOR_QUEUE_S * (f.heard_at == -np.inf)),
        capacity=Line(turn_s / (block_size * held), missing / held * turn_s, most(coming - f.rows_free, 0.0) * turn_s),
        preemption=Line(again * some, again * (some * grown + (f.kv_usage - KV_CLIFF) * room), 0.0),
        itl_s=trusted * itl_s(f, f.booked_requests, most) + (1 - trusted) * _assumed_itl_s(rates, f.booked_requests),
    )


def crowding(rates: Rates) -> float:
    """Seconds that others will wait longer for each token of a prefill and each second until its request's first one: at the
    common speed, so that a replica which reports too high a speed is not believed twice."""
    return CROWDING * rates.arrivals / max(rates.prefill_tokens_per_s, 1.0)


def queue_s(f: Any, now: float, most: Most) -> Any:
    """Seconds of prefill that are still to do of what a report told: it has been worked on since."""
    return most(f.backlog_tokens * f.s_per_token - (now - f.heard_at) / f.correction, 0.0)


def itl_s(f: Any, booked: Any, most: Most) -> Any:
    """Inter-token time of a batch of what runs and is booked and one more, by the step that was measured."""
    return f.step_s * (ROWS_PER_STEP + 1 + f.running + booked) / (ROWS_PER_STEP + most(f.batch, 1.0))


def _assumed_itl_s(rates: Rates, booked: Any) -> Any:
    """The inter-token time of a replica of which nothing is known any more: as at the others."""
    return rates.itl_s * (ROWS_PER_STEP + 1 + booked) / (ROWS_PER_STEP + 1)
