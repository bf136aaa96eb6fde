"""Mixtures of experts with Llama's attention: Mixtral (Mistral AI, 2023), Qwen2-MoE, Qwen3-MoE (2024, 2025), GLM-4.5 (2025).

Routing, shared experts and which layers are plain MLPs are in the configuration.
"""

import logging
import re
from typing import ClassVar

import msgspec
import torch

from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.experts import Experts, Gate, Router
from penstock.engine.models.layers.linear import ColumnParallelLinear
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weights, prefixed
from penstock.engine.models.llama import MLP, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from penstock.kernels.experts.routing import Routing

log = logging.getLogger(__name__)

_EXPERT = re.compile(r"^model\.layers\.(\d+)\..*\.experts\.(\d+)\.")


class MoeMLP:
    """Experts that a router chooses, and at times one that all tokens share."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        experts = config.experts
        assert experts is not None, "a plain MLP's place"
        routing = Routing(
            top_k=experts.top_k,
            sigmoid=experts.sigmoid,
            renormalise=experts.renormalise,
            scale=experts.scale,
            groups=experts.groups,
            top_groups=experts.top_groups,
            group_best=2 if experts.sigmoid else 1,
        )
        hidden, count = config.hidden_size, experts.count
        self.gate = Router(hidden, count, routing, experts.biased, experts.corrected, experts.in_float32, build)
        gate = Gate("clamped_swiglu", experts.clamp) if experts.clamp else Gate(config.activation)
        sizes = hidden, experts.intermediate_size, count, experts.top_k
        self.experts = Experts(*sizes, gate, experts.biased, build.within("experts"))
        self._shared_name, self.shared = experts.shared_name, None
        if experts.shared_size:
            as_dense = msgspec.structs.replace(config, intermediate_size=experts.shared_size)
            self.shared = LlamaMLP(as_dense, build.within(experts.shared_name))
        self.shared_gate = None
        if experts.shared_gate:
            one = {"shared_expert_gate": Span(1, 0, 1)}
            self.shared_gate = ColumnParallelLinear("shared_expert_gate", hidden, one, False, build)
        self._comm = build.comm

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        found = self.gate.weights() | prefixed("experts", self.experts.weights())
        if self.shared is not None:
            found |= prefixed(self._shared_name, self.shared.weights())
        return found if self.shared_gate is None else found | self.shared_gate.weights()

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for part in (self.gate, self.experts, self.shared, self.shared_gate):
            if part is not None:
                part.finish()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        found = self.experts(hidden, *self.gate(hidden))
        if self.shared is None:
            return found if self.experts.is_whole else self._comm.all_reduce(found)
        shared = self.shared.partial(hidden)
        if self.shared_gate is not None:
            shared = shared * _sigmoid(self.shared_gate(hidden)).to(shared.dtype)
        if self.experts.is_whole:
            return found + self._comm.all_reduce(shared)
        # One sum over the ranks for both.
        return self._comm.all_reduce(found + shared)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """In float64, [n, 1]: torch's own rounds otherwise in the last elements of a tensor, and so by the number of tokens."""
    return x.double().sigmoid().float()


class MoeDecoderLayer(LlamaDecoderLayer):
    """The Moe decoder layer."""

    def make_mlp(self, config: DecoderConfig, build: Build, index: int) -> MLP:
        """The MLP of layer `index`: families whose layers differ choose here."""
        has_experts = config.experts is not None and config.experts.layers[index]
        return MoeMLP(config, build) if has_experts else LlamaMLP(config, build)


class MoeForCausalLM(LlamaForCausalLM):
    """The Moe model."""

    decoder_layer: ClassVar[type[LlamaDecoderLayer]] = MoeDecoderLayer

    @property
    def mixtures(self) -> list[Experts]:
        """The experts of each layer that has some, in the order of a step."""
        return [layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, MoeMLP)]

    def ignores(self, name: str) -> bool:
        """See LlamaForCausalLM; and experts that other ranks have."""
        found = _EXPERT.search(name)
        if found is not None and int(found[1]) in self._indices:
            mlp = self.layers[self._indices.index(int(found[1]))].mlp
            if isinstance(mlp, MoeMLP) and mlp.experts.is_whole and not mlp.experts.holds(int(found[2])):
                return True
        return super().ignores(name)

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        super().finish()
        one_by_one = [experts for experts in self.mixtures if not experts.fused]
        if one_by_one:
            log.warning("experts of %d layers run one by one, more slowly: no fused kernel takes these weights", len(one_by_one))


_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class MixtralForCausalLM(MoeForCausalLM):
    """The Mixtral model, with names of its own."""

    def weights(self) -> Weights:
        """Return the tensors of the model by their names in the checkpoint."""
        return {mixtral_name(name): weight for name, weight in super().weights().items()}


def mixtral_name(name: str) -> str:
    """Returns what Mixtral's checkpoints call a module or a tensor of a mixture of experts."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    return re.sub(r"(\.experts\.\d+\.)(\w+)", lambda found: found[1] + _MIXTRAL.get(found[2], found[2]), name)
