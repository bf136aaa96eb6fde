"""Sampling on a CPU: only what a row asks for is computed, and only the likeliest tokens are sorted. Shapes depend on the data,
so no graph can hold these operations. The reference documents arguments and results."""

import math

import numpy as np
import torch

from penstock.kernels.sampling.buffers import Column, Path, SamplingBuffers
from penstock.kernels.sampling.params import RowParams, columns
from penstock.kernels.sampling.philox import Purpose, uniform
from penstock.kernels.sampling.reference import RowLogprobs

CANDIDATES = 256
"""The likeliest tokens, among which almost every filter ends; to sort them costs a fraction of sorting the vocabulary."""
_NOTHING = float("-inf")
_AT_ONCE = 1 << 17
"""Logits that are masked at a time: half a megabyte, which a core's cache holds."""
_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.float32(np.inf), np.float32(_NOTHING)
)
"""[256, 8]: by byte of a mask, what its tokens' logits are at most."""


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: torch.Tensor,
    buffers: SamplingBuffers,
    path: Path,
    masked: bool = False,
) -> torch.Tensor:
    """See the reference; of the buffers only `result` is written."""
    x, bad = _finite(logits, masked)
    result = buffers.result[: len(rows)]
    told = result.numpy()
    told[:, Column.NANS :] = 0
    if bad is not None:
        told[:, Column.NANS : Column.INFINITIES + 1] = bad
    if masked or bad is not None:
        told[:, Column.NOTHING_LEFT] = x.amax(-1) == _NOTHING
    # numpy reads a vector at a time: torch takes ten times as long.
    told[:, Column.TOKEN] = x.numpy().argmax(-1)
    if path > Path.GREEDY:
        of = columns(params.index_select(0, rows))
        random = (of.temperature > 0).nonzero().squeeze(-1)
        if random.numel():
            of = RowParams(*(column[random] for column in of))
            left = filtered(x[random], of)
            told[random.numpy(), Column.TOKEN] = draw(left, uniform(of.seed, positions[random].long(), Purpose.SAMPLE))
    return result


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws one token a row from softmax(logits) by inverting the cumulative distribution: one random number a row.

    Args:
        logits: [m, vocab]; -inf never comes out.
        uniforms: [m], float64 in [0, 1).

    Returns:
        [m], int64.
    """
    return pick(torch.softmax(logits, dim=-1, dtype=torch.float64), uniforms)


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws one token a row; arguments as of `draw`, but for weights, [m, vocab] in float64, in place of logits."""
    cumulative = weights.cumsum(-1)
    # The first token whose cumulative weight is above the number: it has a weight of its own above 0.
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True).squeeze(-1)
    # A row of which nothing is left has no number below its sum.
    return drawn.clamp(max=weights.shape[1] - 1)


def processed(
    logits: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, params: torch.Tensor, buffers: SamplingBuffers
) -> torch.Tensor:
    """See the reference; the filters run once more over these rows."""
    del buffers
    found, of = logits[at].float(), columns(params.index_select(0, rows))
    random = (of.temperature > 0).nonzero().squeeze(-1)
    if random.numel():
        found[random] = filtered(found[random], RowParams(*(column[random] for column in of)))
    return found


def clean(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference."""
    if math.isfinite(logits.sum().item()):
        return logits.float().clone(), torch.zeros(len(logits), 2, dtype=torch.int32)
    bad = _count_bad(logits, masked=False)
    return logits.float().masked_fill((bad > 0).any(1)[:, None], 0.0), bad


def logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    width: int,
    normalised: bool,
    buffers: SamplingBuffers,
    masked: bool = False,
) -> RowLogprobs:
    """See the reference; any number of alternatives."""
    del buffers
    x, bad = _finite(logits, masked)
    values = torch.log_softmax(x, dim=-1) if normalised else x
    mine = values.gather(-1, token_ids.long()[:, None])
    top, top_ids = _greatest(values, width)
    unasked = torch.arange(width) >= counts[:, None]
    return RowLogprobs(
        mine.squeeze(-1),
        (values > mine).sum(-1, dtype=torch.int32),
        top_ids.masked_fill(unasked, -1).int(),
        top.masked_fill(unasked, _NOTHING),
        torch.zeros(len(x), 2, dtype=torch.int32) if bad is None else bad,
    )


def mask(logits: torch.Tensor, at: torch.Tensor, bitmask: torch.Tensor) -> None:
    """See the reference; the lesser of each logit and a limit, of which a table has eight for each byte of the mask."""
    values, packed, places = logits.numpy(), bitmask.numpy().view(np.uint8), at.numpy()
    vocab = min(values.shape[1], 8 * packed.shape[1])
    packed = packed[:, : -(-vocab // 8)]
    step = max(1, _AT_ONCE // max(vocab, 1))
    for begin in range(0, len(places), step):
        some = places[begin : begin + step]
        limits = _LIMITS.take(packed[begin : begin + step], axis=0).reshape(len(some), -1)[:, :vocab]
        if some[-1] - some[0] == len(some) - 1 and (np.diff(some) == 1).all():
            rows = values[some[0] : some[-1] + 1]
            np.minimum(rows[:, :vocab], limits, out=rows[:, :vocab])
            rows[:, vocab:] = _NOTHING
        else:
            for row, limit in zip(some.tolist(), limits, strict=True):
                np.minimum(values[row, :vocab], limit, out=values[row, :vocab])
                values[row, vocab:] = _NOTHING


def penalise(
    logits: torch.Tensor,
    at: torch.Tensor,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    penalties: torch.Tensor,
    longest: int,
) -> None:
    """See the reference; the work is that of the rows' tokens, not of the vocabulary."""
    del longest
    table, number = token_ids.numpy(), np.zeros(logits.shape[1], np.float32)
    each = zip(at.tolist(), rows.tolist(), begins.tolist(), ends.tolist(), penalties.numpy(), strict=True)
    for index, row, begin, end, (repetition, frequency, presence) in each:
        x, known = logits[index].numpy(), (table[row, :end], table[row, begin:end])
        tokens, output = (part[part < len(x)] for part in known)
        # A token that is there several times gets the same value as often.
        if repetition != 1:
            there = x[tokens]
            x[tokens] = np.where(there > 0, there / repetition, there * repetition)
        if frequency or presence:
            np.add.at(number, output, 1)
            x[output] = x[output] - number[output] * frequency - presence
            number[output] = 0


def _finite(logits: torch.Tensor, masked: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[m, vocab], float32, -inf in place of what is not finite; and how many of each row are not, as in `_count_bad`: None where
    there are none."""
    if masked:
        most = logits.amax(-1)
        well = not bool((most.isnan() | most.isposinf()).any())
    else:
        # A sum with a NaN or an infinity in it is not finite either, and is far cheaper than a look at each.
        well = math.isfinite(logits.sum().item())
    if well:
        return logits.float(), None
    return torch.where(logits.isfinite(), logits.float(), _NOTHING), _count_bad(logits, masked)


def _count_bad(logits: torch.Tensor, masked: bool) -> torch.Tensor:
    """[m, 2], int32: how many logits are NaN, and how many are infinite; -inf counts unless it is a mask."""
    infinite = logits.isposinf() if masked else logits.isinf()
    return torch.stack((logits.isnan().sum(-1), infinite.sum(-1)), dim=1).int()


def filtered(logits: torch.Tensor, of: RowParams) -> torch.Tensor:
    """Temperature, min-p, top-k and top-p of [m, vocab], none of which is greedy; what goes is -inf."""
    scaled = logits / of.temperature[:, None]
    if bool((of.log_min_p > _NOTHING).any()):
        # A ratio of probabilities is a difference of logits, so that no softmax is needed.
        floor = scaled.amax(-1) + of.log_min_p
        scaled = scaled.masked_fill(scaled < floor[:, None], _NOTHING)
    filtered = ((of.top_k > 0) | (of.top_p < 1.0)).nonzero().squeeze(-1)
    if filtered.numel():
        scaled[filtered] = apply_filters(scaled[filtered], of.top_k[filtered], of.top_p[filtered])
    return scaled


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
    unlimited = (top_k == 0) | (top_k >= vocab)
    likeliest = ordered.masked_fill(torch.arange(count) >= torch.where(unlimited, vocab, top_k)[:, None], _NOTHING)
    mass = _weights(likeliest, ordered).sum(-1)
    open_ended = unlimited & (top_p < 1.0)
    if count < vocab and bool(open_ended.any()):
        mass[open_ended] = _weights(logits[open_ended], ordered[open_ended]).sum(-1)
    kept = _apply_top_p(likeliest, top_p, mass)
    # What equals the last candidate may be outside; so may a part of a larger top-k's mass.
    lowest = kept.masked_fill(kept.isneginf(), float("inf")).amin(-1)
    ended = (lowest > ordered[:, -1]) & (unlimited | (top_k <= count))
    return torch.full_like(logits, _NOTHING).scatter_(-1, ids, kept), ended


def _apply_top_p(ordered: torch.Tensor, top_p: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Masks the tokens before which the probabilities already add up to p; the first always stays.

    Args:
        ordered: [m, n], descending: the likeliest tokens, or all.
        top_p: [m], in (0, 1]; 1 masks nothing.
        mass: [m], float64: the sum of `_weights` over all tokens that may stay, also those that are not among the n.
    """
    # Weights relative to the likeliest token make the sums of equal tokens exact. Rounding could keep a token too many.
    weights = _weights(ordered, ordered)
    before = weights.cumsum(-1) - weights
    outside = (before >= (top_p * mass)[:, None]) & (top_p < 1.0)[:, None]
    outside[:, 0] = False
    return ordered.masked_fill(outside, _NOTHING)


def _weights(logits: torch.Tensor, ordered: torch.Tensor) -> torch.Tensor:
    """e^(logit - greatest) of each of `logits`, [m, n], float64."""
    return (logits - ordered[:, :1]).exp().double()


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens' logits and ids, each [m, count], in descending order, of equals the smallest id first."""
    if count == logits.shape[-1]:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    return _by_id(*logits.topk(count, dim=-1, sorted=False))


def _greatest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` greatest of each row and their ids, each [m, count]. Which of equals topk gives depends on `count`, and so on
    what the other rows asked for: here it is the smallest id."""
    greatest, ids = values.topk(count, dim=-1, sorted=True)
    if not count:
        return greatest, ids
    at_least_last = (values >= greatest[:, -1:]).sum(-1)
    greatest, ids = _by_id(greatest, ids)
    cut = (at_least_last > count).nonzero().squeeze(-1)  # through equals, some of which are not among them
    if cut.numel():
        wider, wider_ids = _by_id(*values[cut].topk(int(at_least_last[cut].max()), dim=-1))
        greatest[cut], ids[cut] = wider[:, :count], wider_ids[:, :count]
    return greatest, ids


def _by_id(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In descending order, of equals the smallest id first."""
    ids, order = ids.sort(dim=-1)
    values, again = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, again)
