"""Which experts a token is sent to, and how much each of them counts."""

from dataclasses import dataclass

import torch

_TINY = 1e-20
"""Added to the sum that weights are divided by: where all scores are 0, so are the weights."""


@dataclass(frozen=True)
class Routing:
    """How a model's routers choose."""

    top_k: int
    """Experts of a token."""
    sigmoid: bool = False
    """Whether a score is the sigmoid of its logit; otherwise scores are the softmax of all logits."""
    renormalise: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights at the end."""
    groups: int = 1
    """Parts of equal size into which the experts are cut."""
    top_groups: int = 1
    """Groups that a token's experts are chosen from."""
    group_best: int = 1
    """Scores of a group's best experts that are added up to rank it."""


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts, in float32. Of equal scores, the expert with the lower number comes first.

    Args:
        logits: [n, experts].
        bias: [experts], float32: added to scores for the choice, not for the weights. None: nothing is.
        routing: The rule.

    Returns:
        The experts [n, top_k], int32, best first; and their weights [n, top_k], float32.
    """
    logits = logits.float()
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        ranks = grouped.topk(routing.group_best, -1).values.sum(-1)
        kept = _best(ranks, routing.top_groups)
        open_groups = torch.zeros_like(ranks).scatter(1, kept, 1.0) > 0
        choice = torch.where(open_groups[..., None], grouped, float("-inf")).flatten(-2)
    ids = _best(choice, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return ids.int(), weights * routing.scale


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the greatest, [n, count]. A stable sort: `topk` does not say which of equal ones it takes."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]
