"""A decoder that is one part of a checkpoint, beside what makes embeddings of images."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Protocol

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.comm import OneRank
from penstock.engine.models.layers.linear_method import DeviceLinearMethod
from penstock.engine.models.layers.shard import Shard
from penstock.engine.models.layers.vocab import LMHead, VocabEmbedding
from penstock.engine.models.layers.weight import Weights, prefixed
from penstock.engine.models.model import AuxStates, Carry, Layer
from penstock.engine.models.registry import model_class


class Part(Protocol):
    """What a model has beside its decoder."""

    def weights(self) -> Weights:
        """The part's, without a prefix."""
        ...

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        ...


class ModelWithImages(ABC):
    """A `VisionModel` but for `encode_image`. Its parts beside the decoder are whole on every rank. They are not quantized, and
    take no adapters."""

    language: ClassVar[str] = "language_model"
    """Before the names of the decoder's tensors; "": they have nothing before them."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        assert config.vision is not None, "the configuration of a model that sees has the tower's"
        body = build.within(self.language) if self.language else build
        self._text = model_class(config.vision.text_architecture)(config, body)
        self._sees = build.stage.first
        self._parts: dict[str, Part] = {}

    @staticmethod
    def whole(build: Build) -> Build:
        """For parts that are on every rank of the first pipeline stage; on others they have no memory."""
        method, device = build.plain_method or build.linear_method, build.device
        if not build.stage.first:
            device = torch.device("meta")
            method = partial(DeviceLinearMethod, device=device)
        return dataclasses.replace(build, linear_method=method, device=device, shard=Shard(), comm=OneRank())

    def has(self, parts: Mapping[str, Part]) -> None:
        """The parts beside the decoder, by what stands before the names of their tensors."""
        self._parts = dict(parts)

    @property
    def layers(self) -> Sequence[Layer]:
        """The stage's decoder layers."""
        return self._text.layers

    @property
    def embed_tokens(self) -> VocabEmbedding | None:
        """None: another stage has it."""
        return self._text.embed_tokens

    @property
    def lm_head(self) -> LMHead | None:
        """None: the model embeds, or another stage has it."""
        return self._text.lm_head

    def weights(self) -> Weights:
        """Every tensor that the checkpoint must have, by name."""
        found = self._text.weights()
        found = prefixed(self.language, found) if self.language else found
        for prefix, part in self._parts.items() if self._sees else ():
            # Adapters are for the decoder alone.
            found |= {name: weight._replace(part=None) for name, weight in prefixed(prefix, part.weights()).items()}
        return found

    def ignores(self, name: str) -> bool:
        """Whether the checkpoint may have a tensor that neither the decoder nor another part needs."""
        if name.partition(".")[0] in self._parts:
            return not self._sees or self.ignores_of_parts(name)
        before = f"{self.language}." if self.language else ""
        return name.startswith(before) and self._text.ignores(name.removeprefix(before))

    @abstractmethod
    def ignores_of_parts(self, name: str) -> bool:
        """The same of a tensor that is not the decoder's."""

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for part in (self._text, *(self._parts.values() if self._sees else ())):
            part.finish()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, hidden]: what `forward` makes of token ids first."""
        return self._text.embed(input_ids)

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        carry: Carry | None = None,
        aux: AuxStates | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, of the last stage."""
        return self._text.forward(inputs, positions, ctx, carry, aux)

    def advance(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        carry: Carry | None = None,
        aux: AuxStates | None = None,
    ) -> Carry:
        """The same up to the stage's last layer: what the next stage begins with."""
        return self._text.advance(inputs, positions, ctx, carry, aux)

    def states(
        self, inputs: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext, carry: Carry | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What `forward` computes, part by part: the name of each and its output, [n, hidden]; the last is the final norm."""
        return self._text.states(inputs, positions, ctx, carry)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, vocab]: in the model's dtype, which samplers widen, or in float32 where they are scaled."""
        return self._text.compute_logits(hidden)
