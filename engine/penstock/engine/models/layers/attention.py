"""What a model's attention layer tells the forward context about itself."""

from dataclasses import dataclass

from penstock.kernels.prepare_kv.reference import QKNorm


@dataclass(frozen=True)
class Attention:
    """One layer's attention; sizes are the rank's."""

    index: int
    """Which layer's cache it reads and writes."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    softcap: float
    """Of the scores; 0 where there is none."""
    qk_norm: QKNorm | None
