"""What a model's attention layer tells the forward context about itself."""

from dataclasses import dataclass

import torch

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
    sinks: torch.Tensor | None = None
    """[heads], float32: the score of one more key a head, whose value is zero."""
    value_size: int = 0
    """Elements of a value that are the last of its key, as in latent attention; 0: values are as large as keys, beside them."""

    @property
    def out_size(self) -> int:
        """Of a token's result."""
        return self.num_heads * (self.value_size or self.head_size)
