"""What the ranks of a group add up, in plain torch."""

from collections.abc import Sequence

import torch


def add_in_order(partials: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the ranks' partial sums: added in float32 and in the order of ranks, rounded once."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total.to(partials[0].dtype)
