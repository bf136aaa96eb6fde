"""Angles of the rotary position embedding, with the ways of stretching it that checkpoints name."""

import math

import torch

from penstock.engine.models.rope import RopeConfig
from penstock.kernels.ops import Ops
from penstock.kernels.prepare_kv.reference import Rotary


class RotaryEmbedding:
    """Cosine and sine of every position up to `max_positions`, computed once, on the CPU: devices have the same bits.

    A step's angles are gathered once for all layers, not by each layer through its positions: that would be the same bytes a
    layer, and one load more to wait for.
    """

    def __init__(self, rope: RopeConfig, max_positions: int, ops: Ops, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(rope, max_positions))
        # [positions, r]: the cosines, then the sines.
        self._table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.attention_factor).to(device)
        self._ops, self._axes = ops, section_axes(rope).to(device)

    def __call__(self, positions: torch.Tensor) -> Rotary:
        """The angles of positions [n], or of positions in time, row and column, [3, n]; once a step for all layers."""
        if positions.ndim == 1:
            return Rotary(*self._ops.embedding(self._table, positions).chunk(2, dim=-1))
        found = self._ops.embedding(self._table, positions.reshape(-1)).view(3, positions.shape[1], 2, -1)
        cos, sin = found.gather(0, self._axes.expand(1, *found.shape[1:]))[0].unbind(1)
        return Rotary(cos.contiguous(), sin.contiguous())


def section_axes(rope: RopeConfig) -> torch.Tensor:
    """By which position each pair turns, [size / 2] int64: 0 time, 1 the row, 2 the column; empty without sections."""
    if not rope.sections:
        return torch.empty(0, dtype=torch.int64)
    if not rope.interleaved_sections:
        return torch.arange(3).repeat_interleave(torch.tensor(rope.sections))
    axes = torch.arange(rope.size // 2) % 3
    for axis in (1, 2):
        axes[3 * rope.sections[axis] + axis :: 3] = 0
    return axes


def inverse_frequencies(rope: RopeConfig, max_positions: int) -> torch.Tensor:
    """Radians a position of each pair, [size / 2] float32.

    Args:
        rope: Which embedding.
        max_positions: The longest sequence that is served. Where frequencies depend on the length, this one's are used for all
            sequences: they would otherwise change under the keys that are in the cache.
    """
    plain = _powers(rope.theta, rope.size)
    if rope.type == "none":
        return torch.zeros_like(plain)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "dynamic":
        return _dynamic(rope, max_positions)
    if rope.type == "yarn":
        return _yarn(plain, rope)
    if rope.type == "longrope":
        long = max_positions > rope.original_max_position_embeddings
        return plain / torch.tensor(rope.long_factor if long else rope.short_factor)
    if rope.type == "llama3":
        return _llama3(plain, rope)
    return plain


def _powers(theta: float, size: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _dynamic(rope: RopeConfig, max_positions: int) -> torch.Tensor:
    """A greater base for a greater length ("NTK-aware", by bloc97 and emozilla)."""
    stretch = max(1.0, max_positions / rope.original_max_position_embeddings)
    base = rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (rope.size / (rope.size - 2))
    return _powers(base, rope.size)


def _yarn(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """YaRN (Peng et al., 2023): pairs that turn rarely are stretched by the factor, others kept, those between blended."""

    def pair(turns: float) -> float:
        """Which pair turns so often over the original length."""
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.size * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    ramp = (torch.arange(rope.size // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1.0 - stretched)


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1's: long wavelengths are stretched by the factor, short ones kept, those between blended."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor
