"""The gate of a gated MLP (Shazeer, 2020): SwiGLU as Llama has it, GeGLU as Gemma has it, clamped SwiGLU as gpt-oss has it."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) · up in the input's dtype, computed in float32.

    Args:
        gate_up: [n, 2 d]: the gate's columns, then the up projection's.

    Returns:
        [n, d].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The same with gelu in its tanh form (Hendrycks and Gimpel, 2016)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def clamped_swiglu(gate_up: torch.Tensor, slope: float, limit: float) -> torch.Tensor:
    """gpt-oss's form: gate · sigmoid(slope · gate) · (up + 1), the gate at most `limit`, `up` between -limit and limit."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(slope * gate) * (up.clamp(-limit, limit) + 1)).to(gate_up.dtype)
