"""Draft heads: a decoder layer or a few that guess on from the target model's hidden states.

An entry of a head pairs the target's state of position i with the embedding of token i + 1, and stands at position i.
"""

from typing import Generic, Protocol, TypeVar

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.head_config import HeadConfig
from penstock.engine.models.layers.linear import ColumnParallelLinear
from penstock.engine.models.layers.rotary import RotaryEmbedding
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.vocab import LMHead, VocabEmbedding
from penstock.engine.models.layers.weight import Weight, Weights, prefixed
from penstock.engine.models.llama import LlamaDecoderLayer
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
        """Bring the weights into the kernels' form, after loading."""
        ...

    def share(self, target: Model) -> None:
        """Takes the target's embedding and LM head where the head has none."""
        ...

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] tokens to [n, hidden]; embeddings stay what they are."""
        ...

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states, [n, as many as the head takes], to what the first layer takes, [n, hidden]."""
        ...

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass.

        Args:
            input_ids: [n]: of the token after each entry's position, or its embedding, [n, hidden].
            hidden: [n, hidden]: as `combine` gives it, or as the pass before has returned it.
            positions: [n].
            ctx: The caches of the head's layers.

        Returns:
            [n, hidden] each: what the LM head takes, and what the next pass takes for `hidden`.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, draft vocabulary]: see `Model.compute_logits`."""
        ...

    @property
    def vocabulary(self) -> torch.Tensor | None:
        """[draft vocabulary], int64: the target's ids of the head's; None: the same. Once loaded."""
        ...


LayerT = TypeVar("LayerT", bound=LlamaDecoderLayer)


class FusingHead(Generic[LayerT]):
    """A head that joins several inputs by one projection, the `fc`, before its layers."""

    def __init__(self, config: HeadConfig, layer: type[LayerT], fc_inputs: int, build: Build, fc: str = "fc") -> None:
        self.config, decoder = config, config.decoder
        hidden = decoder.hidden_size
        width = {fc.rpartition(".")[2]: Span(hidden, 0, hidden)}  # whole on every rank: it is small, and its input is
        self.fc = ColumnParallelLinear(fc, fc_inputs, width, config.fc_bias, build)
        self._rotaries = [RotaryEmbedding(rope, build.max_model_len, build.ops, build.device) for rope in decoder.ropes[:1]]
        names = [config.layer_name.format(at) for at in range(decoder.num_layers)]
        self.layers = [layer(decoder, build.within(name), at) for at, name in enumerate(names)]
        self.embed_tokens = VocabEmbedding(decoder.vocab_size, hidden, build) if config.has_embedding else None
        self.lm_head = LMHead(hidden, config.draft_vocab_size, build) if config.has_lm_head else None
        self._offsets: torch.Tensor | None = None
        if config.draft_vocab_size != decoder.vocab_size:
            self._offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=build.device)

    def weights(self) -> Weights:
        """Every tensor that the checkpoint must have."""
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
        """Bring the weights into the kernels' form, after loading."""
        self.fc.finish()
        for layer in self.layers:
            layer.finish()
        if self.lm_head is not None:
            self.lm_head.finish()

    def share(self, target: Model) -> None:
        """Takes the target's embedding and LM head where the head has none."""
        self._target = target
        if self.embed_tokens is None:
            assert target.embed_tokens is not None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] tokens to [n, hidden]; see DraftHead."""
        if input_ids.is_floating_point():
            return input_ids
        embedding = self._target.embed_tokens if self.embed_tokens is None else self.embed_tokens
        assert embedding is not None
        return embedding(input_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, draft vocabulary]: see `Model.compute_logits`."""
        return self._target.compute_logits(hidden) if self.lm_head is None else self.lm_head(hidden)

    @property
    def vocabulary(self) -> torch.Tensor | None:
        """[draft vocabulary], int64: the target's ids of the head's; None: the same."""
        return None if self._offsets is None else self._offsets + torch.arange(len(self._offsets), device=self._offsets.device)

    def angles(self, positions: torch.Tensor) -> Rotary:
        """Of n positions."""
        return self._rotaries[0](positions)
