"""On a CPU the kernels that `Ops` comes with; on a device plain torch: slow, correct, and what runs where nothing else can."""

import torch

from penstock.engine.attention.backends.interface import AttentionBackend, AttentionNeeds
from penstock.engine.runner.device.graphs.descriptor import GraphSupport
from penstock.kernels.ops import Ops
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.device_reference import paged_attention_device


class TorchBackend(AttentionBackend):
    """Attention by torch operations. It allocates nothing and refuses nothing."""

    name = "torch"

    @classmethod
    def refusals(cls, needs: AttentionNeeds) -> list[str]:
        return []

    @classmethod
    def graph_support(cls, needs: AttentionNeeds) -> GraphSupport:
        return GraphSupport.ALWAYS

    def bind(self, ops: Ops) -> Ops:
        return ops if self.needs.device == "cpu" else super().bind(ops)

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: DeviceBatch,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        value_size: int = 0,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return paged_attention_device(q, kv_cache, batch, scale, softcap, sinks, out, value_size, scales)
