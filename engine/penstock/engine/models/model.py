"""What runners, loaders, adapters and tracers know of a model."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.layers.vocab import LMHead, VocabEmbedding
from penstock.engine.models.layers.weight import Weights
from penstock.kernels.prepare_kv.reference import Rotary


class Carry(NamedTuple):
    """What one layer passes on to the next, and one pipeline stage to the next."""

    hidden: torch.Tensor
    """[n, hidden]: the last sublayer's output."""
    residual: torch.Tensor | None
    """[n, hidden]: the residual stream without it; None: `hidden` is the whole stream."""
    deep: tuple[torch.Tensor, ...] = ()
    """[n, hidden] each: what is added to the stream after each of the next layers (DeepStack, Meng et al., 2024)."""
    aux: tuple[torch.Tensor, ...] = ()
    """[n, hidden] each: of a stage, the `AuxStates` of this stage and those before, in the order of layers."""
    following: torch.Tensor | None = None
    """[n, hidden]: of a stage, the embedding of the image after each token, for a head in the last stage; None: none has one."""

    @classmethod
    def of(cls, parts: torch.Tensor, aux: int = 0, deep: int = 0, following: int = 0) -> "Carry":
        """From [1 or 2, `deep`, `aux` and `following`, n, hidden]."""
        end = len(parts) - following
        own, others = end - deep - aux, end - aux
        residual, last = parts[1] if own > 1 else None, parts[end] if following else None
        return cls(parts[0], residual, tuple(parts[own:others]), tuple(parts[others:end]), last)

    def parts(self) -> list[torch.Tensor]:
        """What `of` takes, one by one."""
        perhaps = [[] if part is None else [part] for part in (self.residual, self.following)]
        return [self.hidden, *perhaps[0], *self.deep, *self.aux, *perhaps[1]]

    def stream(self) -> torch.Tensor:
        """[n, hidden]: the whole residual stream."""
        return self.hidden if self.residual is None else self.hidden + self.residual


AuxStates = dict[int, torch.Tensor]
"""By layer, the residual stream that enters it, [n, hidden]. A caller sets the keys; the model fills in the values."""


Encoding = Generator[float, None, torch.Tensor]
"""A run through a tower. It yields before each layer the part of it that is done, from 0 to less than 1."""


class Layer(Protocol):
    """A decoder layer. Its two parts can be replaced by what wraps them."""

    self_attn: Any
    mlp: Any

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a `Carry` holds, to the same after this layer."""
        ...


class Model(Protocol):
    """A decoder, or one pipeline stage of it."""

    @property
    def layers(self) -> Sequence[Layer]:
        """The stage's decoder layers."""
        ...

    @property
    def embed_tokens(self) -> VocabEmbedding | None:
        """None: another stage has it."""
        ...

    @property
    def lm_head(self) -> LMHead | None:
        """None: the model embeds, or another stage has it."""
        ...

    def weights(self) -> Weights:
        """Every tensor that the checkpoint must have, by name. A name without its last part is that of a module, which adapters
        and quantization use too."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor may be there and is not needed."""
        ...

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        ...

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, hidden]: what `forward` makes of token ids first."""
        ...

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        carry: Carry | None = None,
        aux: AuxStates | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, of the last stage.

        Args:
            inputs: Token ids, [n] int32 or int64; or embeddings in their place, [n, hidden] in floating point; where images have
                features for layers, [n, (1 + layers) · hidden]: what is added after each of the first ones is behind.
            positions: [n], int32 or int64: of each token in its request; or [3, n] in time, row and column, where the rotary
                embedding has sections.
            ctx: The caches, and which tokens are whose.
            carry: From the stage before; `inputs` is not read then.
            aux: Takes the states that are asked for.

        Returns:
            [n, hidden].
        """
        ...

    def advance(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        carry: Carry | None = None,
        aux: AuxStates | None = None,
    ) -> Carry:
        """The same up to the stage's last layer: what the next stage begins with."""
        ...

    def states(
        self, inputs: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext, carry: Carry | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What `forward` computes, part by part: the name of each and its output, [n, hidden]; the last is the final norm."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, vocab]: in the model's dtype, which samplers widen, or in float32 where they are scaled."""
        ...


class VisionModel(Model, Protocol):
    """A decoder with a tower, for which an image is some tokens' embeddings."""

    def encode_image(self, image: torch.Tensor, original: tuple[int, int] | None) -> Encoding:
        """The embeddings that take the places of an image's placeholders.

        Args:
            image: [height, width, 3], normalised, float32.
            original: As of `Pixels`.

        Returns:
            A run that stops before each layer; in the end [tokens, hidden], or where it has features for layers,
            [tokens, (1 + layers) · hidden].
        """
        ...
