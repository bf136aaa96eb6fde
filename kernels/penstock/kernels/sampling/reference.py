"""Choosing a token a row, in torch: by a full sort, in float64, without a synchronisation or a shape that depends on data."""

from typing import NamedTuple

import torch

from penstock.kernels.sampling.buffers import Column, Path, SamplingBuffers
from penstock.kernels.sampling.params import RowParams, columns
from penstock.kernels.sampling.philox import Purpose, uniform

_NOTHING = float("-inf")


class RowLogprobs(NamedTuple):
    """Of k rows of logits."""

    sampled: torch.Tensor
    """[k], float32: of the given token."""
    ranks: torch.Tensor
    """[k], int32: how many tokens have greater logits."""
    top_ids: torch.Tensor
    """[k, width], int32, likeliest first, of equals the smallest id; -1 past a row's own number."""
    top_logprobs: torch.Tensor
    """[k, width], float32; -inf past a row's own number."""
    bad: torch.Tensor
    """[k, 2], int32: how many logits are NaN, and how many are infinite."""


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: torch.Tensor,
    buffers: SamplingBuffers,
    path: Path,
    masked: bool = False,
) -> torch.Tensor:
    """Chooses a token a row: greedy ones the likeliest, the others by temperature, min-p, top-k, top-p and an inverted CDF.

    A row's outcome is a function of its own logits, parameters and position.

    Args:
        logits: [m, vocab], float32, bfloat16 or float16. What is not finite is never chosen.
        rows: [m], int32: of `params`.
        positions: [m], int32: in the request, of the token that is chosen.
        params: [rows, WORDS], int32; see `sampling.params`.
        buffers: For at least m rows.
        path: At least what the rows ask for.
        masked: -inf is a token that cannot be chosen, not a broken logit.

    Returns:
        [m, RESULT], int32: the first rows of `buffers.result`; see Column. `buffers.threshold` and `last_id` are written too.
    """
    del path
    of = columns(params.index_select(0, rows))
    wide = logits.float()
    finite = torch.where(wide.isfinite(), wide, _NOTHING)
    greedy = of.temperature == 0
    scaled = finite / torch.where(greedy, 1.0, of.temperature)[:, None]
    kept, threshold, last_id = _filter(scaled, of)
    unfiltered = greedy | ((of.top_k == 0) & (of.top_p >= 1) & of.log_min_p.isneginf())
    buffers.threshold[: len(rows)] = torch.where(unfiltered, _NOTHING, threshold)
    buffers.last_id[: len(rows)] = torch.where(unfiltered, logits.shape[1], last_id)

    base = scaled.amax(-1, keepdim=True)
    mass = torch.where(kept, (scaled.double() - base.double()).exp(), 0.0).nan_to_num()
    cumulative = mass.cumsum(-1)
    target = uniform(of.seed, positions.long(), Purpose.SAMPLE)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    most = finite.argmax(-1)
    infinities = wide.isposinf() if masked else wide.isinf()
    result = buffers.result[: len(rows)]
    result[:, Column.TOKEN] = torch.where(greedy, most, drawn.clamp(max=logits.shape[1] - 1)).int()
    result[:, Column.NANS] = wide.isnan().sum(-1).int()
    result[:, Column.INFINITIES] = infinities.sum(-1).int()
    result[:, Column.NOTHING_LEFT] = base.squeeze(-1).isneginf().int()
    return result


def _filter(scaled: torch.Tensor, of: RowParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[m, vocab], bool: what stays; [m]: the least logit of it; and [m]: the greatest id that has that logit and stays."""
    vocab = scaled.shape[1]
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    stays = (ordered >= (ordered[:, 0] + of.log_min_p)[:, None]) & (ordered > _NOTHING)
    count = torch.where(of.top_k > 0, of.top_k, vocab)
    stays &= torch.arange(vocab, device=scaled.device) < count[:, None]
    mass = torch.where(stays, (ordered.double() - ordered[:, :1].double()).exp(), 0.0)
    cumulative = mass.cumsum(-1)
    inside = (cumulative - mass < of.top_p[:, None] * cumulative[:, -1:]) | (of.top_p >= 1)[:, None]
    inside[:, 0] = True
    stays &= inside
    threshold = torch.where(stays, ordered, float("inf")).amin(-1)
    last_id = torch.where(stays & (ordered == threshold[:, None]), ids, -1).amax(-1)
    kept = torch.zeros_like(stays).scatter_(-1, ids, stays)
    return kept, threshold, last_id.int()


def logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    width: int,
    normalised: bool,
    buffers: SamplingBuffers,
    masked: bool = False,
) -> RowLogprobs:
    """Log probabilities of given tokens and of the likeliest ones.

    Args:
        logits: [k, vocab]; what is not finite counts as -inf.
        token_ids: [k], int32.
        counts: [k], int32: alternatives that each row asked for.
        width: At least the greatest of these; at most the vocabulary and the buffers' candidates of a tile.
        normalised: False gives the logits instead.
        buffers: For at least k rows; what `sample` left in their tiles is gone afterwards.
        masked: -inf is a token that cannot be chosen, not a broken logit.

    Raises:
        ValueError: Too many alternatives.
    """
    most = buffers.candidates.shape[2]
    if width > most:
        raise ValueError(f"{width} alternatives: more than {most}")
    wide = logits.float()
    infinities = wide.isposinf() if masked else wide.isinf()
    bad = torch.stack((wide.isnan().sum(-1), infinities.sum(-1)), dim=1).int()
    finite = torch.where(wide.isfinite(), wide, _NOTHING)
    values = torch.log_softmax(finite, dim=-1) if normalised else finite
    at = token_ids.long()[:, None]
    ranks = (finite > finite.gather(-1, at)).sum(-1).int()
    top_ids = torch.sort(finite, dim=-1, descending=True, stable=True).indices[:, :width]
    unasked = torch.arange(width, device=logits.device) >= counts[:, None]
    top = values.gather(-1, top_ids).masked_fill(unasked, _NOTHING)
    return RowLogprobs(values.gather(-1, at).squeeze(-1), ranks, top_ids.masked_fill(unasked, -1).int(), top, bad)


def processed(
    logits: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, params: torch.Tensor, buffers: SamplingBuffers
) -> torch.Tensor:
    """What tokens were drawn from: logits after temperature, -inf where filters have left nothing.

    Args:
        logits: [m, vocab]: what `sample` was given last.
        at: [k], int64: which of the m.
        rows: [k], int32: of `params`.
        params: [rows, WORDS], int32: what `sample` was given.
        buffers: As `sample` left them.

    Returns:
        [k, vocab], float32.
    """
    temperature = columns(params.index_select(0, rows)).temperature
    scaled = logits.index_select(0, at).float() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    limit, last_id = buffers.threshold.index_select(0, at)[:, None], buffers.last_id.index_select(0, at)[:, None]
    left = (scaled > limit) | ((scaled == limit) & (torch.arange(logits.shape[1], device=logits.device) <= last_id))
    return torch.where(left, scaled, _NOTHING)


def clean(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy to be changed, [m, vocab], float32, in which rows that are not finite are 0 throughout, so that they break nothing
    that looks at several rows; and [m, 2], int32: how many logits of each row are NaN, and how many are infinite."""
    bad = torch.stack((logits.isnan().sum(-1), logits.isinf().sum(-1)), dim=1).int()
    return torch.where((bad > 0).any(1)[:, None], 0.0, logits.float()), bad


def mask(logits: torch.Tensor, at: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Makes tokens that may not be chosen -inf, in place.

    Args:
        logits: [m, vocab], float32.
        at: [k], int64: which of the m, each once.
        bitmask: [k, words], int32: token t is allowed where bit t % 32 of word t // 32 is set; no token without a bit is.
    """
    vocab = logits.shape[1]
    bits = (bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device)) & 1
    allowed = torch.zeros(len(at), vocab, dtype=torch.bool, device=logits.device)
    known = min(vocab, 32 * bitmask.shape[1])
    allowed[:, :known] = bits.view(len(at), -1)[:, :known] != 0
    logits.index_copy_(0, at, torch.where(allowed, logits.index_select(0, at), _NOTHING))


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
    """Applies the repetition penalty, then frequency and presence penalties, in place.

    Args:
        logits: [m, vocab], float32.
        at: [k], int32: which of the m, each once.
        token_ids: [rows, n], int32: the tokens of all requests.
        rows: [k], int32: of `token_ids`.
        begins: [k], int32: where the output begins.
        ends: [k], int32: where the tokens end.
        penalties: [k, 3], float32: repetition, frequency and presence penalty; 1, 0 and 0 change nothing.
        longest: No row has more tokens.
    """
    vocab = logits.shape[1]
    tokens = token_ids[:, :longest].index_select(0, rows).long()
    place = torch.arange(tokens.shape[1], device=tokens.device)
    inside = (place < ends[:, None]) & (tokens < vocab)
    tokens = torch.where(inside, tokens, 0)
    output = inside & (place >= begins[:, None])
    zeros = torch.zeros(len(at), vocab, dtype=torch.float32, device=logits.device)
    times = zeros.scatter_add(1, tokens, output.float())
    present = zeros.scatter_add(1, tokens, inside.float()) > 0
    repetition, frequency, presence = penalties.unbind(1)
    x = logits.index_select(0, at)
    repeated = torch.where(x > 0, x / repetition[:, None], x * repetition[:, None])
    lowered = repeated - times * frequency[:, None] - torch.where(times > 0, presence[:, None], 0.0)
    logits.index_copy_(0, at.long(), torch.where(present, lowered, x))
