"""Prefill and decode apart: the joint choice of a decode replica and of the prefill replica that computes the prompt for it.

Both halves of a pair are chosen at once, by what they cost together (DistServe, OSDI 2024, and Splitwise, ISCA 2024, say why
apart may pay): the queue and the prefill there, the transfer, the room and the inter-token time here. The hop is left out where
it does not pay, where little is to be computed, where no decode replica has room for what would come, and where no prefill
replica lays its KV cache out as the decode replica does.
"""

from typing import NamedTuple

import numpy as np

from penstock.api.fleet import Replica
from penstock.gateway.picker.cost import Estimate, estimate, horizon
from penstock.gateway.picker.figures import Bools, Floats, Rows
from penstock.gateway.picker.slate import Slate

RECOMPUTE_TOKENS = 64
"""With fewer tokens to compute than this, fetching them costs more than computing them."""
OUTPUT_TOKENS = 256
"""Output tokens that are assumed for an answer of unknown length."""


_PREFILL_TERMS = ("queue_s", "booked_s", "prefill_s", "encoder_s", "crowding_s")
"""What a hop takes off the decode replica."""


class Hop(NamedTuple):
    """The replica that computes the prompt, and the cost of the transfer against computing it at the decode replica; in
    seconds."""

    replica: Replica
    fresh_tokens: int
    """Prompt tokens that its prefix cache would not supply."""
    prefill_s: float
    """Seconds until the prompt is computed there, with its queue."""
    transfer_s: float
    local_s: float
    """The first token without the hop, and what the prefill would cost those that decode and wait there."""


class Joint(NamedTuple):
    """The pairs of one request; one element a row of the decode slate."""

    score: Floats
    """Seconds, as `Cost`'s: with the hop or without it, whichever is less."""
    prefill_row: Rows
    """Row of the prefill slate to hop over; -1: no hop."""
    prefill_s: Floats
    transfer_s: Floats
    local_s: Floats
    fresh_tokens: Floats
    """Prompt tokens that are not resident at the decode replica."""
    comparable: Bools
    """True where a prefill replica has the same KV layout."""
    room: Bools
    """What would come fits now."""

    def kept(self, rows: Rows) -> "Joint":
        """Return the joint choice for `rows` only, in that order."""
        return Joint(
            score=self.score[rows],
            prefill_row=self.prefill_row[rows],
            prefill_s=self.prefill_s[rows],
            transfer_s=self.transfer_s[rows],
            local_s=self.local_s[rows],
            fresh_tokens=self.fresh_tokens[rows],
            comparable=self.comparable[rows],
            room=self.room[rows],
        )

    def terms(self, decode: Slate) -> dict[str, Floats]:
        """The figures behind the scores, which they add up to but for the horizon's inter-token times."""
        cost, hops = estimate(decode), self.prefill_row >= 0
        local = {name: np.where(hops, 0.0, column) for name, column in cost._asdict().items() if name in _PREFILL_TERMS}
        stall_s = np.where(hops, 0.0, _stall_s(decode, cost))
        hop = {"hop_s": np.where(hops, self.prefill_s, 0.0), "transfer_s": np.where(hops, self.transfer_s, 0.0)}
        return {**cost._asdict(), **local, "stall_s": stall_s, **hop}

    def hop(self, row: int, prefill: Slate) -> Hop | None:
        """What the request does before it comes to the decode replica in `row`."""
        at = int(self.prefill_row[row])
        if at < 0:
            return None
        replica = prefill.replicas[at]
        assert replica is not None
        fresh = int(prefill.request.prompt_tokens - prefill.resident[at])
        return Hop(replica, fresh, float(self.prefill_s[row]), float(self.transfer_s[row]), float(self.local_s[row]))

    def why_none(self, row: int) -> str:
        """Why there is no hop before `row`."""
        if self.fresh_tokens[row] < RECOMPUTE_TOKENS:
            return f"only {int(self.fresh_tokens[row])} tokens are to be computed"
        if not self.comparable[row]:
            return "no prefill replica has the same KV layout"
        if not self.room[row]:
            return "there is no room yet for a transferred prompt"
        remote = self.prefill_s[row] + self.transfer_s[row]
        return f"a prefill elsewhere would take {remote:.3g} s, here it takes {self.local_s[row]:.3g} s"


def join(decode: Slate, prefill: Slate) -> Joint:
    """Weighs, for every decode replica, the best prefill replica that it can take KV blocks from."""
    here, there = estimate(decode), estimate(prefill)
    fresh = decode.request.prompt_tokens - decode.resident
    room = _room(decode)
    best_row, best_s = _best_prefill(decode, prefill, _prefill_s(prefill, there))
    comparable = best_row >= 0
    transfer_s = decode.figures.transfer_s + fresh * decode.figures.transfer_s_per_token
    local_s = here.queue_s + here.booked_s + here.prefill_s + here.encoder_s + here.crowding_s + _stall_s(decode, here)
    remote_s = best_s + transfer_s
    pays = comparable & room & (fresh >= RECOMPUTE_TOKENS) & (remote_s < local_s)
    horizon_s = horizon(decode.request.max_tokens) * here.itl_s
    both = here.capacity_s + here.lora_s + here.eviction_s + here.preemption_s + here.uncertainty_s + horizon_s
    return Joint(
        score=np.where(pays, remote_s, local_s) + both,
        prefill_row=np.where(pays, best_row, -1),
        prefill_s=best_s,
        transfer_s=transfer_s,
        local_s=local_s,
        fresh_tokens=fresh,
        comparable=comparable,
        room=room,
    )


def _stall_s(decode: Slate, cost: Estimate) -> Floats:
    """What the prefill would cost those that decode there: as much as it takes, to each of them, shared out over all requests."""
    running = decode.figures.running
    return (cost.prefill_s + cost.encoder_s) * running / (running + 1)


def _room(slate: Slate) -> Bools:
    """Return where the request would find a row, and blocks for its prompt and answer, after all waiting and coming work. Unknown
    figures do not exclude a replica."""
    f = slate.figures
    answer = OUTPUT_TOKENS if slate.request.max_tokens is None else slate.request.max_tokens
    tokens = slate.request.prompt_tokens - slate.resident + min(answer, OUTPUT_TOKENS) + f.booked_tokens + f.booked_transfers
    return (f.rows_free > f.waiting + f.booked_requests) & (np.ceil(tokens / slate.request.block_size) <= f.blocks_free)


def _prefill_s(slate: Slate, cost: Estimate) -> Floats:
    """Return the seconds until the prompt is computed. A prefill holds KV memory only until its transfer ends. If memory is
    short, waiting requests go first, each for about as long."""
    f = slate.figures
    blocks = np.ceil((slate.request.prompt_tokens - slate.resident + f.booked_tokens) / slate.request.block_size)
    short = np.where(blocks > f.blocks_free, f.waiting + f.booked_requests + 1, 0.0)
    return cost.queue_s + cost.booked_s + cost.prefill_s + cost.encoder_s + cost.uncertainty_s + short * cost.prefill_s


def _best_prefill(decode: Slate, prefill: Slate, prefill_s: Floats) -> tuple[Rows, Floats]:
    """Return, by decode row, the prefill row with the same KV layout that is done first (-1: none), and its time."""
    rows = np.full(len(decode.open), -1, np.intp)
    seconds = np.full(len(decode.open), np.inf)
    among = prefill.open if prefill.last_resorts is None else prefill.open & ~prefill.last_resorts
    theirs, ours = prefill.figures.kv_layout, decode.figures.kv_layout
    for layout in np.unique(theirs[among & (theirs > 0)]):
        same = np.flatnonzero(among & (theirs == layout))
        costs = prefill_s[same]
        ties = same[costs <= costs.min()]
        row = ties[np.argmin(prefill.lots(ties))]
        rows[ours == layout] = row
        seconds[ours == layout] = prefill_s[row]
    return rows, seconds
