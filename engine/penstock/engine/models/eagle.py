"""The heads of EAGLE: EAGLE-1 (Li et al., arXiv 2401.15077) takes the states after the target's final norm, EAGLE-3 (arXiv
2503.01840) the residual streams that enter three of its layers, one beside the other."""

from typing import ClassVar

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.draft_head import FusingHead
from penstock.engine.models.head_config import HeadConfig
from penstock.engine.models.layers.linear import QKVParallelLinear
from penstock.engine.models.layers.norm import RMSNorm
from penstock.engine.models.layers.weight import Weights
from penstock.engine.models.llama import LlamaAttention, LlamaDecoderLayer, make_norm
from penstock.kernels.prepare_kv.reference import Rotary


class Eagle1Layer(LlamaDecoderLayer):
    """A Llama layer; the first has no norm before its attention."""

    def __init__(self, config: DecoderConfig, build: Build, index: int) -> None:
        super().__init__(config, build, index)
        self._first = index == 0

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        found = super().weights()
        if self._first:
            del found["input_layernorm.weight"]
        return found

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last output and the residual stream (none in the first layer), [n, hidden] each, to the same after this layer."""
        if not self._first:
            return super().__call__(hidden, residual, rotary, ctx)
        attended, residual = self._norms[1].add(self.self_attn(hidden, rotary, ctx), hidden)
        return self.mlp(attended), residual


class Eagle1Head(FusingHead[Eagle1Layer]):
    """The embedding and the state side by side through one projection, then Llama layers, and the target's LM head on what comes
    out of them as it is."""

    def __init__(self, config: HeadConfig, build: Build) -> None:
        super().__init__(config, Eagle1Layer, config.decoder.hidden_size + config.target_hidden_size, build)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """See DraftHead: the projection takes the state as it is."""
        return states

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass."""
        x, residual, rotary = self.fc(torch.cat((self.embed(input_ids), hidden), dim=-1)), None, self.angles(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, ctx)
        x = x if residual is None else x + residual
        return x, x


class Eagle3Layer(LlamaDecoderLayer):
    """A Llama layer whose attention sees the embedding and the state, each normalised, side by side."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "hidden_norm", "post_attention_layernorm")

    def __init__(self, config: DecoderConfig, build: Build, index: int) -> None:
        super().__init__(config, build, index)
        heads, within = (config.num_heads, config.num_kv_heads), build.within("self_attn")
        self.self_attn: LlamaAttention
        self.self_attn.qkv_proj = QKVParallelLinear(2 * config.hidden_size, *heads, config.head_size, config.qkv_bias, within)

    def stream(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rotary: Rotary, ctx: AttentionContext, *, norm_before_residual: bool
    ) -> torch.Tensor:
        """[n, hidden] each, the embedding and the state → the residual stream after this layer, [n, hidden]."""
        before, of_state, after = self._norms
        state = of_state(hidden)
        attended = self.self_attn(torch.cat((before(embedded), state), dim=-1), rotary, ctx)
        attended, residual = after.add(attended, state if norm_before_residual else hidden)
        return self.mlp(attended) + residual


class Eagle3Head(FusingHead[Eagle3Layer]):
    """Three of the target's states through one projection, once; then a layer, a norm, and an LM head of its own."""

    def __init__(self, config: HeadConfig, build: Build) -> None:
        super().__init__(config, Eagle3Layer, config.states_size, build)
        self.norm = make_norm("norm", config.decoder.hidden_size, config.decoder, build)
        size, eps = config.states_size, config.decoder.rms_norm_eps
        self.input_norm = RMSNorm("input_norm", size, eps, build.ops, 0.0, build.device) if config.norm_before_fc else None

    def weights(self) -> Weights:
        """Every tensor that the checkpoint must have."""
        found = super().weights() | self.norm.weights()
        return found if self.input_norm is None else found | self.input_norm.weights()

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states, [n, as many as the head takes], to what the first layer takes, [n, hidden]."""
        return self.fc(states if self.input_norm is None else self.input_norm(states))

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass."""
        embedded, rotary = self.embed(input_ids), self.angles(positions)
        for layer in self.layers:
            hidden = layer.stream(embedded, hidden, rotary, ctx, norm_before_residual=self.config.norm_before_residual)
        return self.norm(hidden), hidden
