"""What every layer of a model is built with."""

from dataclasses import dataclass

import torch

from penstock.engine.models.layers.linear_method import CPU, LinearMethodFactory
from penstock.engine.models.layers.shard import Shard
from penstock.kernels.ops import Ops


@dataclass(frozen=True)
class Build:
    """Chosen once at start."""

    ops: Ops
    linear_method: LinearMethodFactory
    dtype: torch.dtype
    max_model_len: int
    shard: Shard
    device: torch.device = CPU
    """Where weights and tables lie; `meta`: nowhere, to compile without a device."""
    lm_head: bool = True
    """Whether the model has one: without, it gives hidden states alone."""
