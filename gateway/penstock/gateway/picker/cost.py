"""The cost of sending a request to each replica, in seconds.

The estimate is the time to the first token (queue, capacity, prefill of what is not resident there, recompute by preemption)
plus a horizon of tokens at the inter-token time that the request would see. Load that is not known is not read as no load: as a
report ages, its figures fade into what the other replicas of the model show, with a floor.
"""

from typing import NamedTuple

import numpy as np

from penstock.gateway.picker.figures import PRIOR_QUEUE_S, Figures, Floats
from penstock.gateway.picker.folded import (
    EVICTION,
    GRACE_S,
    HALF_LIFE_S,
    KV_CLIFF,
    assumed_itl_s,
    costs,
    crowding,
    itl_s,
    queue_s,
)
from penstock.gateway.picker.slate import Slate

HORIZON_TOKENS = 16
"""How many output tokens' inter-token time counts as much as the time to the first."""


class Estimate(NamedTuple):
    """What each row would cost, by cause; all in seconds, float64 [rows]."""

    queue_s: Floats
    """Prefill that the replica reports as still to do."""
    booked_s: Floats
    """Prefill of requests sent there that it has not reported yet."""
    capacity_s: Floats
    """Waiting for rows or KV blocks."""
    prefill_s: Floats
    """This request's tokens that are not resident."""
    lora_s: Floats
    """Waiting for the adapter to be loaded, or for a slot."""
    eviction_s: Floats
    """Prefill that others will repeat, since these tokens push theirs out of the cache."""
    crowding_s: Floats
    """What those that come to the replica meanwhile wait longer behind these tokens."""
    preemption_s: Floats
    """Expected recompute, where KV memory is nearly full."""
    uncertainty_s: Floats
    """Queue assumed in place of what the report is too old to say: that of the others."""
    itl_s: Floats
    """Inter-token time with this request in the batch."""

    @property
    def ttft_s(self) -> Floats:
        """Estimated time to the first token: all but what it costs others."""
        total = self.queue_s + self.booked_s
        for term in (self.capacity_s, self.prefill_s, self.lora_s, self.preemption_s, self.uncertainty_s):
            total += term
        return total

    @property
    def others_s(self) -> Floats:
        """What the request costs others before its first token."""
        return self.eviction_s + self.crowding_s

    def cost_s(self, tokens: int, correction: Floats) -> Floats:
        """What is minimised: the time to the first token and what it costs others, by what its promises have been worth, and
        the time of `tokens` more."""
        return (self.ttft_s + self.others_s) * correction + tokens * self.itl_s


def horizon(slate: Slate) -> int:
    """Tokens whose inter-token time counts."""
    return HORIZON_TOKENS if slate.max_tokens is None else min(HORIZON_TOKENS, slate.max_tokens)


def trust(slate: Slate) -> Floats:
    """How much of each report still counts, 0 to 1, by its age; 0 without one."""
    age = slate.now - slate.figures.heard_at
    return np.exp2(np.minimum(GRACE_S - age, 0.0) / HALF_LIFE_S)


def cost_s(slate: Slate) -> Floats:
    """`Estimate.cost_s` of the slate's request in every row, without its parts; reports may seem younger by as long as rates are
    kept."""
    folded, fresh = slate.columns.folded(slate.now, slate.block_size), slate.prompt_tokens - slate.resident
    lora_s = None if slate.lora_s is None else slate.lora_s * slate.figures.correction
    return costs(folded, fresh, horizon(slate), lora_s)


def estimate(slate: Slate) -> Estimate:
    """The cost of the slate's request in every row, part by part."""
    f = slate.figures
    trusted = trust(slate)
    fresh = slate.prompt_tokens - slate.resident
    tokens = f.booked_tokens + f.booked_transfers + fresh
    running = np.maximum(f.running, 1.0)
    prefill_s = fresh * f.s_per_token
    alone = Estimate(
        queue_s=trusted * queue_s(f, slate.now, np.maximum),
        booked_s=f.booked_tokens * f.s_per_token,
        capacity_s=trusted * _capacity_s(slate, tokens, running),
        prefill_s=prefill_s,
        lora_s=np.zeros(len(fresh)) if slate.lora_s is None else slate.lora_s,
        eviction_s=EVICTION * prefill_s,
        crowding_s=np.zeros(len(fresh)),
        preemption_s=trusted * _preemption_s(slate, tokens),
        uncertainty_s=(1 - trusted) * np.maximum(slate.rates.queue_s, PRIOR_QUEUE_S * (f.heard_at == -np.inf)),
        itl_s=trusted * itl_s(f, f.booked_requests, np.maximum) + (1 - trusted) * assumed_itl_s(slate.rates, f.booked_requests),
    )
    return alone._replace(crowding_s=crowding(slate.rates) * fresh * alone.ttft_s)


def promised_ttft_s(slate: Slate, one: Figures, resident: float, cost_s: float) -> float:
    """The time to the first token within the cost of one replica, as its reports have it: nothing is estimated again.

    Args:
        slate: The pick.
        one: The replica's figures: single numbers in place of columns.
        resident: Prompt tokens that its prefix cache would supply.
        cost_s: See `Estimate.cost_s`.
    """
    age = slate.now - float(one.heard_at)
    trusted, booked = 2.0 ** (min(GRACE_S - age, 0.0) / HALF_LIFE_S), float(one.booked_requests)
    pace_s = trusted * itl_s(one, booked, max) + (1 - trusted) * assumed_itl_s(slate.rates, booked)
    fresh = slate.prompt_tokens - resident
    promised = (cost_s - horizon(slate) * pace_s) / float(one.correction) - EVICTION * fresh * float(one.s_per_token)
    return max(promised / (1 + crowding(slate.rates) * fresh), 0.0)


def _capacity_s(slate: Slate, tokens: Floats, running: Floats) -> Floats:
    """Seconds until there are a row and KV blocks for all that waits and for this request, if answers of average length end one
    after another. What waits without such need waits for its turn, which is the queue's time and not counted again."""
    f = slate.figures
    crowd = f.waiting + f.booked_requests + 1 - f.rows_free
    missing = (f.backlog_tokens + tokens) / slate.block_size - f.blocks_free
    short = np.maximum(np.maximum(crowd, missing / np.maximum(f.held_blocks, 1.0)), 0.0)
    return short * slate.rates.output_tokens * f.step_s / running


def _preemption_s(slate: Slate, tokens: Floats) -> Floats:
    """Seconds of prefill that preemptions would repeat: of all tokens beyond what the KV memory holds well. Whatever decodes
    grows: by half an answer still if it runs, by a whole one if it is yet to begin."""
    f, answer = slate.figures, slate.rates.output_tokens
    grown = tokens + answer * (f.running / 2 + f.waiting + f.booked_requests + 1)
    room = f.kv_blocks * slate.block_size
    beyond = f.kv_usage + grown / np.maximum(room, 1.0) - KV_CLIFF
    return np.maximum(beyond, 0.0) * room * f.s_per_token
