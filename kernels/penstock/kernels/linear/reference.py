"""A linear layer over a weight that was brought into a kernel's own order once."""

import torch
import torch.nn.functional as F

LANES = 16
"""Outputs that stand side by side in a packed weight."""


WORD_BYTES = 4
"""Of inputs that stand side by side for each output: a pair in bfloat16, one in float32."""
ROWS = 32
"""Of each product of `linear_rows`."""


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] → [⌈out / 16⌉, ⌈in / w⌉, 16, w]: words of w inputs, of 16 outputs side by side; w is 2 in bfloat16 and 1 in
    float32. What is added is 0."""
    out_features, in_features = weight.shape
    word = WORD_BYTES // weight.dtype.itemsize
    missing = -in_features % word, -out_features % LANES
    padded = F.pad(weight, (0, missing[0], 0, missing[1])) if any(missing) else weight.contiguous()
    words = padded.view(torch.int32).view(-1, LANES, padded.shape[1] // word)
    return words.transpose(1, 2).contiguous().view(weight.dtype).view(*words.shape[::2], LANES, word)


def linear_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x · weightᵀ + bias by torch; a row's result is a function of that row. How many rows a product has decides which kernel a
    CPU's library takes, and with it a row's last bits: so each has the same number.

    Args:
        x: [n, in].
        weight: [out, in].
        bias: [out].

    Returns:
        [n, out].
    """
    parts = F.pad(x, (0, 0, 0, -x.shape[0] % ROWS)).split(ROWS)
    return torch.cat([F.linear(part, weight, bias) for part in parts])[: x.shape[0]]


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    """x · weightᵀ + bias; a row's result is a function of that row.

    Args:
        x: [n, in].
        packed: What `pack_weight` made of the weight.
        bias: [out] or None.
        out_features: Of the weight.

    Returns:
        [n, out] in x's dtype; sums are in float32.
    """
    weight = packed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:out_features, : x.shape[1]]
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)
