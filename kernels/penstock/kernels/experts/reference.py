"""A layer of experts: each token passes through a few of many MLPs, whose results are added up by weight."""

from collections.abc import Callable, Sequence

import torch

MLP = Callable[[torch.Tensor], torch.Tensor]


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, mlps: Sequence[MLP]) -> torch.Tensor:
    """Runs each expert once, on the tokens that chose it; an expert without tokens is not run.

    The sum of a token's results is in float32 and in the order of its choices, so that it does not depend on other tokens.

    Args:
        x: [n, hidden].
        ids: [n, k], int32: the experts of each token.
        weights: [n, k], float32.
        mlps: By expert, [m, hidden] → [m, hidden]; a row's result does not depend on the others.

    Returns:
        [n, hidden] in x's dtype.
    """
    found = x.new_zeros(*ids.shape, x.shape[1])
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        found[token, choice] = mlps[expert](x[token])
    return combined(found, weights)


def experts_on_device(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, mlps: Sequence[MLP]) -> torch.Tensor:
    """The same without a look at the choices by the host, as graphs need it: runs every expert on every token, for tests."""
    found = x.new_zeros(*ids.shape, x.shape[1])
    for expert, mlp in enumerate(mlps):
        found = torch.where((ids == expert)[..., None], mlp(x)[:, None], found)
    return combined(found, weights)


def combined(found: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[n, k, hidden] → [n, hidden]; one choice after the other, since torch's own sums have no stated order."""
    total = torch.zeros_like(found[:, 0], dtype=torch.float32)
    for choice in range(found.shape[1]):
        total += found[:, choice].float() * weights[:, choice, None]
    return total.to(found.dtype)


def combine_rows(results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of each token's results, which experts have computed elsewhere; as `experts` has it.

    Args:
        results: [rows, hidden].
        places: [n, k], int64: the row of each choice.
        weights: [n, k], float32.

    Returns:
        [n, hidden] in the dtype of the results.
    """
    return combined(results[places], weights)
