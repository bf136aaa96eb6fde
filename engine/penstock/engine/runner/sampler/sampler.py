"""From logits to tokens, in a fixed order: check, greedy choice, temperature, min-p, top-k, top-p, draw.

Indexed by logits row; each row's token is a function of its own logits, parameters and position.
"""

import torch

from penstock.engine.runner.sampler.draw import draw
from penstock.engine.runner.sampler.greedy import greedy
from penstock.engine.runner.sampler.min_p import apply_min_p
from penstock.engine.runner.sampler.params import SamplingBatch
from penstock.engine.runner.sampler.philox import Purpose, uniform
from penstock.engine.runner.sampler.temperature import apply_temperature
from penstock.engine.runner.sampler.top_k import apply_top_k
from penstock.engine.runner.sampler.top_p import apply_top_p


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Chooses a token a row.

    Args:
        logits: [m, vocab], float32 and finite. Not changed.
        batch: The rows' parameters.

    Returns:
        [m], int64.
    """
    tokens = greedy(logits)
    random = (~batch.greedy).nonzero().squeeze(-1)
    if random.numel():
        tokens[random] = _sample_random(logits[random], batch, random)
    return tokens


def _sample_random(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
    logits = apply_temperature(logits, batch.temperature[rows])
    if bool(batch.min_p[rows].any()):
        logits = apply_min_p(logits, batch.min_p[rows])
    filtered = ((batch.top_k[rows] > 0) | (batch.top_p[rows] < 1.0)).nonzero().squeeze(-1)
    if filtered.numel():
        of = rows[filtered]
        # Stable, so that among equals the smallest ids stay. Back in vocabulary order for the draw, so that a row draws
        # the same token whether or not a neighbour made us sort.
        ordered, order = logits[filtered].sort(dim=-1, descending=True, stable=True)
        kept = apply_top_p(apply_top_k(ordered, batch.top_k[of]), batch.top_p[of])
        logits[filtered] = torch.empty_like(kept).scatter_(-1, order, kept)
    return draw(logits, uniform(batch.seed[rows], batch.position[rows], Purpose.SAMPLE))


def describe_not_finite(logits: torch.Tensor) -> dict[int, str]:
    """Row → what is wrong with its logits, [m, vocab], for the rows that have NaN or infinity among them."""
    low, high = torch.aminmax(logits, dim=-1)
    # A NaN is both the least and the greatest.
    bad = (~(low.isfinite() & high.isfinite())).nonzero().squeeze(-1).tolist()
    return {row: _describe(logits[row]) for row in bad}


def _describe(logits: torch.Tensor) -> str:
    nans, infinities = int(logits.isnan().sum()), int(logits.isinf().sum())
    return f"the model's logits are not finite ({nans} NaN and {infinities} infinite of {logits.numel()})"
