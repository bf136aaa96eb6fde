"""Draft heads: a decoder layer or a few that guess on from the target model's hidden states.

An entry of a head pairs the target's state of position i with the embedding of token i + 1, and stands at position i. EAGLE-1
(Li et al., arXiv 2401.15077) takes the states after the final norm. EAGLE-3 (arXiv 2503.01840) takes the residual streams that
enter three layers, one beside the other.
"""

from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.head_config import HeadConfig
from penstock.engine.models.layers.linear import ColumnParallelLinear, QKVParallelLinear
from penstock.engine.models.layers.norm import RMSNorm
from penstock.engine.models.layers.rotary import RotaryEmbedding
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.vocab import LMHead, VocabEmbedding
from penstock.engine.models.layers.weight import Weight, Weights, prefixed
from penstock.engine.models.llama import LlamaAttention, LlamaDecoderLayer, make_norm
from penstock.engine.models.model import Model
from penstock.kernels.prepare_kv.reference import Rotary


class DraftHead(Protocol):
    """What a runner knows of a head."""

    def weights(self) -> Weights:
        """Every tensor that the checkpoint must have."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor may be there and is not needed."""
        ...

    def finish(self) -> None:
        """After loading."""
        ...

    def share(self, target: Model) -> None:
        """Takes the target's embedding and LM head where the head has none."""
        ...

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states, [n, as many as the head takes], to what the first layer takes, [n, hidden]."""
        ...

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass.

        Args:
            input_ids: [n]: of the token after each entry's position.
            hidden: [n, hidden]: as `combine` gives it, or as the pass before has returned it.
            positions: [n].
            ctx: The caches of the head's layers.

        Returns:
            [n, hidden] each: what the LM head takes, and what the next pass takes for `hidden`.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, draft vocabulary], float32."""
        ...

    def token_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of the head's, [m] each."""
        ...


LayerT = TypeVar("LayerT", bound=LlamaDecoderLayer)


class _Head(Generic[LayerT]):
    """What EAGLE's two versions do alike."""

    def __init__(self, config: HeadConfig, layer: type[LayerT], fc_inputs: int, build: Build) -> None:
        self.config, decoder = config, config.decoder
        hidden = decoder.hidden_size
        width = {"fc": Span(hidden, 0, hidden)}  # whole on every rank: it is small, and its input is
        self.fc = ColumnParallelLinear("fc", fc_inputs, width, config.fc_bias, build)
        self._rotaries = [RotaryEmbedding(rope, build.max_model_len, build.ops, build.device) for rope in decoder.ropes[:1]]
        self.layers = [layer(decoder, build.within(f"layers.{at}"), at) for at in range(decoder.num_layers)]
        self.embed_tokens = VocabEmbedding(decoder.vocab_size, hidden, build) if config.has_embedding else None
        self.lm_head = LMHead(hidden, config.draft_vocab_size, build) if config.has_lm_head else None
        self._offsets: torch.Tensor | None = None
        if config.draft_vocab_size != decoder.vocab_size:
            self._offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=build.device)

    def weights(self) -> Weights:
        """See DraftHead."""
        found = self.fc.weights()
        for index, layer in enumerate(self.layers):
            found |= prefixed(self.config.layer_name.format(index), layer.weights())
        for part in (self.embed_tokens, self.lm_head):
            found |= {} if part is None else part.weights()
        if self._offsets is not None:
            found["d2t"] = Weight(tuple(self._offsets.shape), self._load_offsets, dtypes=(torch.int64,))
        return found

    def _load_offsets(self, value: torch.Tensor) -> None:
        assert self._offsets is not None
        self._offsets.copy_(value)

    def ignores(self, name: str) -> bool:
        """See DraftHead: what is for training, angles that we compute, and offsets that are all zero."""
        return name in ("t2d", "d2t") or name.endswith(".rotary_emb.inv_freq")

    def finish(self) -> None:
        """See DraftHead."""
        self.fc.finish()
        for layer in self.layers:
            layer.finish()
        if self.lm_head is not None:
            self.lm_head.finish()

    def share(self, target: Model) -> None:
        """See DraftHead."""
        self._target = target
        if self.embed_tokens is None:
            assert target.embed_tokens is not None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, hidden]."""
        embedding = self._target.embed_tokens if self.embed_tokens is None else self.embed_tokens
        assert embedding is not None
        return embedding(input_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return self._target.compute_logits(hidden) if self.lm_head is None else self.lm_head(hidden).float()

    def token_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return draft_ids if self._offsets is None else draft_ids + self._offsets[draft_ids]

    def angles(self, positions: torch.Tensor) -> Rotary:
        """Of n positions."""
        return self._rotaries[0](positions)


class Eagle1Layer(LlamaDecoderLayer):
    """A Llama layer; the first has no norm before its attention."""

    def __init__(self, config: DecoderConfig, build: Build, index: int) -> None:
        super().__init__(config, build, index)
        self._first = index == 0

    def weights(self) -> Weights:
        """See LlamaDecoderLayer."""
        found = super().weights()
        if self._first:
            del found["input_layernorm.weight"]
        return found

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See LlamaDecoderLayer."""
        if not self._first:
            return super().__call__(hidden, residual, rotary, ctx)
        attended, residual = self._norms[1].add(self.self_attn(hidden, rotary, ctx), hidden)
        return self.mlp(attended), residual


class Eagle1Head(_Head[Eagle1Layer]):
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
        """See DraftHead."""
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


class Eagle3Head(_Head[Eagle3Layer]):
    """Three of the target's states through one projection, once; then a layer, a norm, and an LM head of its own."""

    def __init__(self, config: HeadConfig, build: Build) -> None:
        super().__init__(config, Eagle3Layer, config.states_size, build)
        self.norm = make_norm("norm", config.decoder.hidden_size, config.decoder, build)
        size, eps = config.states_size, config.decoder.rms_norm_eps
        self.input_norm = RMSNorm("input_norm", size, eps, build.ops, 0.0, build.device) if config.norm_before_fc else None

    def weights(self) -> Weights:
        """See DraftHead."""
        found = super().weights() | self.norm.weights()
        return found if self.input_norm is None else found | self.input_norm.weights()

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return self.fc(states if self.input_norm is None else self.input_norm(states))

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DraftHead."""
        embedded, rotary = self.embed(input_ids), self.angles(positions)
        for layer in self.layers:
            hidden = layer.stream(embedded, hidden, rotary, ctx, norm_before_residual=self.config.norm_before_residual)
        return self.norm(hidden), hidden


def draft_head(config: HeadConfig, build: Build) -> DraftHead:
    """A head of the kind that the checkpoint has."""
    return (Eagle3Head if config.kind == "eagle3" else Eagle1Head)(config, build)
