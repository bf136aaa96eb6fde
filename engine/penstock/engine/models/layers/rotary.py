"""Angles of the rotary position embedding, with the ways of stretching it that checkpoints name."""

import math

import torch

from penstock.engine.models.config import RopeConfig
from penstock.kernels.prepare_kv.reference import Rotary


class RotaryEmbedding:
    """Cosine and sine of every position up to `max_positions`, computed once."""

    def __init__(self, rope: RopeConfig, head_size: int, max_positions: int) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(rope, head_size))
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, positions: torch.Tensor) -> Rotary:
        """The angles of positions [n]; once a step for all layers."""
        return Rotary(self._cos.index_select(0, positions), self._sin.index_select(0, positions))


def inverse_frequencies(rope: RopeConfig, head_size: int) -> torch.Tensor:
    """Radians a position of each pair, [head_size/2] float32."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1's: long wavelengths are stretched by the factor, short ones kept, those between blended."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor
