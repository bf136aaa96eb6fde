"""LLaVA 1.5 (Liu et al., 2023): a vision tower, a projector of two layers, and a decoder that reads both as tokens."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.comm import OneRank
from penstock.engine.models.layers.linear import ColumnParallelLinear
from penstock.engine.models.layers.shard import Shard, Span
from penstock.engine.models.layers.vocab import LMHead, VocabEmbedding
from penstock.engine.models.layers.weight import Weights, prefixed
from penstock.engine.models.model import AuxStates, Carry, Layer
from penstock.engine.models.registry import model_class
from penstock.engine.models.vision.clip import ClipTower

_LANGUAGE, _TOWER, _PROJECTOR = "language_model", "vision_tower", "multi_modal_projector"


class Projector:
    """From the tower's features to the decoder's embeddings."""

    def __init__(self, features: int, hidden: int, bias: bool, build: Build) -> None:
        span = Span(hidden, 0, hidden)
        self.linear_1 = ColumnParallelLinear("linear_1", features, {"linear_1": span}, bias, build)
        self.linear_2 = ColumnParallelLinear("linear_2", hidden, {"linear_2": span}, bias, build)

    def weights(self) -> Weights:
        """The projector's, without a prefix."""
        return self.linear_1.weights() | self.linear_2.weights()

    def finish(self) -> None:
        """After loading."""
        self.linear_1.finish()
        self.linear_2.finish()

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """[n, features] → [n, hidden]."""
        return self.linear_2(F.gelu(self.linear_1(features)))


class LlavaForConditionalGeneration:
    """See `VisionModel`. Every rank has the whole tower: its layers are neither divided nor quantized, and take no adapters."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        assert config.vision is not None, "the configuration of a model that sees has the tower's"
        vision = self._vision = config.vision
        whole = dataclasses.replace(build, linear_method=build.plain_method or build.linear_method, shard=Shard(), comm=OneRank())
        self._text = model_class(vision.text_architecture)(config, build.within(_LANGUAGE))
        self.tower = ClipTower(vision.tower, whole.within(_TOWER))
        sizes = vision.tower.hidden_size, config.hidden_size
        self.projector = Projector(*sizes, vision.projector_bias, whole.within(_PROJECTOR))

    @property
    def layers(self) -> Sequence[Layer]:
        """See Model."""
        return self._text.layers

    @property
    def embed_tokens(self) -> VocabEmbedding | None:
        """See Model."""
        return self._text.embed_tokens

    @property
    def lm_head(self) -> LMHead | None:
        """See Model."""
        return self._text.lm_head

    def weights(self) -> Weights:
        """See Model."""
        seeing = prefixed(_TOWER, self.tower.weights()) | prefixed(_PROJECTOR, self.projector.weights())
        # Adapters are for the decoder alone.
        return prefixed(_LANGUAGE, self._text.weights()) | {name: weight._replace(part=None) for name, weight in seeing.items()}

    def ignores(self, name: str) -> bool:
        """What the decoder does not need, and what comes after the tower's features."""
        if name.startswith(f"{_LANGUAGE}."):
            return self._text.ignores(name.removeprefix(f"{_LANGUAGE}."))
        if name.startswith(f"{_TOWER}.") and re.search(r"\.(post_layernorm\..+|position_ids)$", name):
            return True
        layer = re.match(rf"{_TOWER}\..*?layers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= len(self.tower.layers)

    def finish(self) -> None:
        """See Model."""
        for part in (self._text, self.tower, self.projector):
            part.finish()

    def encode_image(self, image: torch.Tensor) -> torch.Tensor:
        """See VisionModel."""
        features = self.tower(image)
        return self.projector(features if self._vision.keeps_class else features[1:])

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self._text.embed(input_ids)

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        carry: Carry | None = None,
        aux: AuxStates | None = None,
    ) -> torch.Tensor:
        """See Model."""
        return self._text.forward(inputs, positions, ctx, carry, aux)

    def advance(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        carry: Carry | None = None,
        aux: AuxStates | None = None,
    ) -> Carry:
        """See Model."""
        return self._text.advance(inputs, positions, ctx, carry, aux)

    def states(
        self, inputs: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext, carry: Carry | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See Model."""
        return self._text.states(inputs, positions, ctx, carry)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self._text.compute_logits(hidden)
