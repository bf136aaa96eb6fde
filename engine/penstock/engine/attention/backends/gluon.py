"""As `triton`, but long prompts run on a kernel in Gluon, for Hopper alone. It serves only where it is asked for by name."""

import torch

from penstock.engine.attention.backends.interface import AttentionNeeds, other_cache, outside
from penstock.engine.attention.backends.triton import TritonBackend
from penstock.kernels.paged_attention.launch import LaunchTable, gluon_launches


class GluonBackend(TritonBackend):
    """Decodes, short prompts, prompts whose keys are split and layers with a window have the launches of `triton`."""

    name = "gluon"

    @classmethod
    def table(cls) -> LaunchTable:
        return gluon_launches

    @classmethod
    def refusals(cls, needs: AttentionNeeds) -> list[str]:
        reasons = super().refusals(needs)
        if needs.capability is not None and needs.capability[0] != 9:
            reasons.append("compute capability {}.{} is not 9.x".format(*needs.capability))
        reasons += outside(needs.dtype, (torch.bfloat16,), "dtype") + other_cache(needs)
        reasons += outside(needs.head_size, (64, 128), "head size")
        for size in needs.block_sizes:
            reasons += outside(size, (16, 32, 64, 128), "block size")
        if needs.num_heads > 128 * needs.num_kv_heads:
            reasons.append("more than 128 query heads share a key head")
        if needs.softcap or needs.sinks or needs.value_size:
            reasons.append("soft caps, attention sinks and latent attention are not in its kernel")
        return reasons
