"""The gate of a gated MLP (SwiGLU; Shazeer, 2020)."""

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) · up in the input's dtype, computed in float32.

    Args:
        gate_up: [n, 2 d]: the gate's columns, then the up projection's.

    Returns:
        [n, d].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
