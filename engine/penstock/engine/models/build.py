"""What every layer of a model is built with."""

from dataclasses import dataclass, field, replace

import torch

from penstock.engine.models.layers.comm import Comm, OneRank
from penstock.engine.models.layers.expert_ranks import ExpertRanks
from penstock.engine.models.layers.linear_method import CPU, LinearMethodFactory
from penstock.engine.models.layers.shard import Shard, Stage
from penstock.kernels.ops import Ops


@dataclass(frozen=True)
class Build:
    """Chosen once at start."""

    ops: Ops
    linear_method: LinearMethodFactory
    """Chooses by a layer's name, shape and dtype."""
    dtype: torch.dtype
    max_model_len: int
    shard: Shard
    comm: Comm = field(default_factory=OneRank)
    """Of the group that `shard` is a part of."""
    stage: Stage = field(default_factory=Stage)
    layers: range | None = None
    """The stage's decoder layers; None: the model's."""
    device: torch.device = CPU
    """Where weights and tables lie; `meta`: nowhere, to compile without a device."""
    lm_head: bool = True
    """Whether the whole model has one: without, it gives hidden states alone."""
    embedding: bool = False
    """Whether a stage has the embedding though it is not the first: a draft head reads it."""
    plain_method: LinearMethodFactory | None = None
    """For layers that no adapter and no quantization changes; None: `linear_method`."""
    experts: ExpertRanks | None = None
    """With the ranks that divide the experts; None: `shard` divides each expert."""
    prefix: str = ""
    """Full name of the module that is being built."""

    def within(self, module: str) -> "Build":
        """The same for what is inside a module."""
        return replace(self, prefix=self.name(module))

    def name(self, module: str) -> str:
        """A module's full name."""
        return f"{self.prefix}.{module}" if self.prefix else module
