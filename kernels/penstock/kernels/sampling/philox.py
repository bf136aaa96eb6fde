"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

A number is a function of its key and counter alone, in integer arithmetic that is the same on every device; so a request's draws
do not depend on its neighbours, and there is no generator to keep, to copy or to restore after a preemption.
"""

from enum import IntEnum

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a number is drawn for, so that two draws at one position are independent."""

    SAMPLE = 0
    DRAFT = 1
    """A draft, from a draft model's distribution."""
    ACCEPT = 2
    """Whether such a draft is accepted."""
    RESIDUAL = 3
    """The token in place of one that is not."""


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block function: four words of counter and two of key to four words; int64 tensors holding 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap, which keeps all 64 bits.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Numbers in [0, 1) with 53 random bits.

    Args:
        seeds: [m], int64: each request's.
        positions: [m], int64: in the request, of the token that is drawn.
        purpose: What for.

    Returns:
        [m], float64.
    """
    zero = torch.zeros_like(positions)
    counter = (positions & _MASK, (positions >> 32) & _MASK, zero + int(purpose), zero)
    high, low, _, _ = philox(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    return ((high >> 5) * (1 << 26) + (low >> 6)).double() * 2.0**-53
