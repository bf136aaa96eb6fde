"""Drafts that were drawn, and the test after which tokens are as likely as without drafts (Leviathan et al., arXiv 2211.17192;
Chen et al., arXiv 2302.01318)."""

import torch

from penstock.kernels.sampling.cpu import filtered, pick
from penstock.kernels.sampling.params import columns
from penstock.kernels.sampling.philox import Purpose, uniform


def draw_drafts(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a draft for each row by its request's temperature and filters.

    Args:
        logits: [m, vocab]: the draft model's.
        rows: [m]: of `params`; none is greedy.
        positions: [m]: in the request, of the token that is drafted.
        params: [rows, WORDS], int32; see `sampling.params`.

    Returns:
        [m], int64: the drafts; and [m, vocab], float32: the logits that they were drawn from, -inf for what could not come.
    """
    of = columns(params.index_select(0, rows))
    left = filtered(logits.float(), of)
    return pick(_probabilities(left), uniform(of.seed, positions.long(), Purpose.DRAFT)), left


def settle(
    left: torch.Tensor, draft_left: torch.Tensor, draft_ids: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Accepts each draft with probability min(1, p / q), and draws another token in place of those that are rejected.

    Args:
        left: [m, vocab]: the target's logits after temperature, filters and masks: -inf for what cannot come. Their softmax is p.
        draft_left: [m, vocab]: as of `draw_drafts`. Their softmax is q.
        draft_ids: [m], int64: the drafts, drawn from q.
        seeds: [m], int64: of the requests.
        positions: [m], int64: of the tokens.

    Returns:
        [m], int64: the draft where it is accepted. A rejected draft never comes back: only tokens that p has more of can.
    """
    p, q = _probabilities(left), _probabilities(draft_left)
    of_p, of_q = (probabilities.gather(-1, draft_ids[:, None]).squeeze(-1) for probabilities in (p, q))
    accepted = (uniform(seeds, positions, Purpose.ACCEPT) * of_q < of_p) & (of_q > 0)
    more = (p - q).clamp(min=0)
    # Where p and q differ by no more than rounding, nothing may be left of the difference.
    more = torch.where(more.sum(-1, keepdim=True) > 0, more, p)
    return torch.where(accepted, draft_ids, pick(more, uniform(seeds, positions, Purpose.RESIDUAL)))


def _probabilities(left: torch.Tensor) -> torch.Tensor:
    return torch.softmax(left, dim=-1, dtype=torch.float64)
