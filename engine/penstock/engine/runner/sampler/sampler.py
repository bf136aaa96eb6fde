"""From adjusted logits to tokens, in a fixed order: greedy choice, temperature, min-p, top-k, top-p, draw.

Indexed by logits row; each row's token is a function of its own logits, parameters and position.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from penstock.engine.runner.sampler.draw import draw
from penstock.engine.runner.sampler.greedy import greedy
from penstock.engine.runner.sampler.min_p import apply_min_p
from penstock.engine.runner.sampler.params import SamplingBatch
from penstock.engine.runner.sampler.temperature import apply_temperature
from penstock.engine.runner.sampler.top_k import apply_top_k
from penstock.engine.runner.sampler.top_p import apply_top_p, weigh
from penstock.kernels.sampling.philox import Purpose, uniform

CANDIDATES = 256
"""The likeliest tokens, among which almost every filter ends; sorting them alone costs a fraction of sorting the vocabulary."""


class Sampled(NamedTuple):
    """What came of m rows."""

    token_ids: torch.Tensor
    """[m], int64."""
    random: torch.Tensor
    """[k], int64: the rows that are not greedy."""
    filtered: torch.Tensor
    """[k, vocab], float32: what their tokens were drawn from, after temperature and filters; -inf where masked."""

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        """What each token was chosen from, [m, vocab]: of greedy rows `logits`, those that were sampled."""
        return logits.index_copy(0, self.random, self.filtered)


Change = Callable[[torch.Tensor, torch.Tensor], None]
"""Changes logits [k, vocab] in place, given which of the m rows they are, [k]; the likeliest token stays the likeliest."""


def sample(logits: torch.Tensor, batch: SamplingBatch, change: Change | None = None) -> Sampled:
    """Chooses a token a row.

    Args:
        logits: [m, vocab], float32; -inf where masked, which leaves at least one token a row. Not changed.
        batch: The rows' parameters.
        change: Of what rows that are not greedy are sampled from, between min-p and top-k.
    """
    tokens = greedy(logits)
    random = (~batch.greedy).nonzero().squeeze(-1)
    if not random.numel():
        return Sampled(tokens, random, logits[:0])
    filtered = _filter(logits[random], batch, random, change)
    tokens[random] = draw(filtered, uniform(batch.seed[random], batch.position[random], Purpose.SAMPLE))
    return Sampled(tokens, random, filtered)


def _filter(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor, change: Change | None) -> torch.Tensor:
    logits = apply_temperature(logits, batch.temperature[rows])
    if bool(batch.min_p[rows].any()):
        logits = apply_min_p(logits, batch.min_p[rows])
    if change is not None:
        change(logits, rows)
    filtered = ((batch.top_k[rows] > 0) | (batch.top_p[rows] < 1.0)).nonzero().squeeze(-1)
    if filtered.numel():
        of = rows[filtered]
        logits[filtered] = apply_filters(logits[filtered], batch.top_k[of], batch.top_p[of])
    return logits


def apply_filters(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Top-k, then top-p, of [m, vocab]; what goes is -inf. A row's result is a function of that row."""
    filtered, ended = _filter_likeliest(logits, top_k, top_p, min(CANDIDATES, logits.shape[-1]))
    rest = (~ended).nonzero().squeeze(-1)
    if rest.numel() and logits.shape[-1] > CANDIDATES:
        filtered[rest], _ = _filter_likeliest(logits[rest], top_k[rest], top_p[rest], logits.shape[-1])
    return filtered


def _filter_likeliest(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filters as if the `count` likeliest tokens were all that could stay; and [m], bool: whether that was so."""
    vocab = logits.shape[-1]
    ordered, ids = _likeliest(logits, count)
    likeliest = apply_top_k(ordered, top_k)
    unlimited = (top_k == 0) | (top_k >= vocab)
    mass = weigh(likeliest, ordered).sum(-1)
    open_ended = unlimited & (top_p < 1.0)
    if count < vocab and bool(open_ended.any()):
        mass[open_ended] = weigh(logits[open_ended], ordered[open_ended]).sum(-1)
    kept = apply_top_p(likeliest, top_p, mass)
    # What equals the last candidate may be outside; so may a part of a larger top-k's mass.
    lowest = kept.masked_fill(kept.isneginf(), float("inf")).amin(-1)
    ended = (lowest > ordered[:, -1]) & (unlimited | (top_k <= count))
    return torch.full_like(logits, float("-inf")).scatter_(-1, ids, kept), ended


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens' logits and ids, each [m, count], in descending order, of equals the smallest id first."""
    if count == logits.shape[-1]:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    # By id, then stably by logit.
    ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = torch.sort(logits.gather(-1, ids), dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, order)


def describe_not_finite(logits: torch.Tensor) -> dict[int, str]:
    """Row → what is wrong with its logits, [m, vocab], for the rows that have NaN or infinity among them."""
    # A sum with a NaN or an infinity in it is not finite either, and is far cheaper than the least and greatest of each row.
    if math.isfinite(logits.sum().item()):
        return {}
    low, high = torch.aminmax(logits, dim=-1)
    # A NaN is both the least and the greatest.
    bad = (~(low.isfinite() & high.isfinite())).nonzero().squeeze(-1).tolist()
    return {row: _describe(logits[row]) for row in bad}


def _describe(logits: torch.Tensor) -> str:
    return not_finite_message(int(logits.isnan().sum()), int(logits.isinf().sum()), logits.numel())


def not_finite_message(nans: int, infinities: int, number: int) -> str:
    """What a request is told whose logits, so many, are not all finite."""
    return f"the model's logits are not finite ({nans} NaN and {infinities} infinite of {number})"
