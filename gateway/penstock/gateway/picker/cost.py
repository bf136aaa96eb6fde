"""The cost of sending a request to each replica, in seconds.

The estimate is the time to the first token (queue, capacity, prefill of what is not resident there, recompute by preemption)
plus a horizon of tokens at the inter-token time that the request would see. Load that is not known is not read as no load: as a
report ages, its figures fade into what the other replicas of the model show, with a floor.
"""

from typing import NamedTuple

import numpy as np

from penstock.gateway.picker.figures import Floats
from penstock.gateway.picker.folded import costs, first_s
from penstock.gateway.picker.price import EVICTION, crowding, price
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
    encoder_s: Floats
    """A vision tower's runs for the images that are not resident."""
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
        for term in (self.capacity_s, self.prefill_s, self.lora_s, self.encoder_s, self.preemption_s, self.uncertainty_s):
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


def horizon(max_tokens: int | None) -> int:
    """Tokens whose inter-token time counts for a request that wants so many at most."""
    return HORIZON_TOKENS if max_tokens is None else min(HORIZON_TOKENS, max_tokens)


def cost_s(slate: Slate) -> Floats:
    """`Estimate.cost_s` of the slate's request in every row, without its parts; reports may seem younger by as long as rates are
    kept."""
    folded, fresh = slate.columns.folded(slate.now, slate.request.block_size), slate.request.prompt_tokens - slate.resident
    other_s = None if slate.other_s is None else slate.other_s * slate.figures.correction
    return costs(folded, fresh, horizon(slate.request.max_tokens), other_s)


def folded_of(slate: Slate) -> Floats:
    """The folded prices for the slate's request; see `penstock.gateway.picker.folded`."""
    return slate.columns.folded(slate.now, slate.request.block_size)


def estimate(slate: Slate) -> Estimate:
    """The cost of the slate's request in every row, part by part."""
    f, fresh = slate.figures, slate.request.prompt_tokens - slate.resident
    of = price(f, slate.rates, slate.request.block_size, slate.now, np.maximum)
    prefill_s = fresh * f.s_per_token
    alone = Estimate(
        queue_s=of.queue_s,
        booked_s=of.booked_s,
        capacity_s=of.capacity.at(fresh, np.maximum),
        prefill_s=prefill_s,
        lora_s=np.zeros(len(fresh)) if slate.lora_s is None else slate.lora_s,
        encoder_s=np.zeros(len(fresh)) if slate.encoder_s is None else slate.encoder_s,
        eviction_s=EVICTION * prefill_s,
        crowding_s=np.zeros(len(fresh)),
        preemption_s=of.preemption.at(fresh, np.maximum),
        uncertainty_s=of.uncertainty_s,
        itl_s=of.itl_s,
    )
    return alone._replace(crowding_s=crowding(slate.rates) * fresh * alone.ttft_s)


def promised_ttft_s(slate: Slate, row: int) -> float:
    """The time to the first token that the reports of the replica in `row` promise, as its cost has it, without its
    correction."""
    folded, fresh = slate.columns.folded(slate.now, slate.request.block_size), slate.request.prompt_tokens - slate.resident[row]
    other_s = 0.0 if slate.other_s is None else float(slate.other_s[row])
    return float(first_s(folded[:, row : row + 1], fresh)[0] / slate.figures.correction[row]) + other_s
