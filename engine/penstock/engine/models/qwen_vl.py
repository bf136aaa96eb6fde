"""Qwen2.5-VL and Qwen3-VL (Bai et al., 2025): images of any size, and a Qwen2, Qwen3 or Qwen3-MoE whose rotary embedding has
positions in time, row and column."""

from typing import ClassVar

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.expert_tensors import experts_together
from penstock.engine.models.layers.weight import Weights
from penstock.engine.models.model import Encoding
from penstock.engine.models.vision.config import Qwen3Config, QwenConfig
from penstock.engine.models.vision.model import ModelWithImages
from penstock.engine.models.vision.qwen import QwenTower
from penstock.engine.models.vision.qwen3 import Qwen3Tower

_TOWER = "visual"


class Qwen2_5_VLForConditionalGeneration(ModelWithImages):
    """A tower for images of any size and a Qwen2 decoder; see `VisionModel`."""

    language: ClassVar[str] = ""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        super().__init__(config, build)
        assert isinstance(config.vision, QwenConfig)
        self.tower = QwenTower(config.vision.tower, self.whole(build).within(_TOWER))
        self.has({_TOWER: self.tower})

    def ignores_of_parts(self, name: str) -> bool:
        """Angles that the tower computes."""
        return name.endswith(".inv_freq")

    def encode_image(self, image: torch.Tensor, original: tuple[int, int] | None) -> Encoding:
        """The embeddings that take the places of an image's placeholders."""
        return self.tower(image)


class Qwen3VLForConditionalGeneration(ModelWithImages):
    """The same with a Qwen3 decoder, after whose first layers features of the tower's layers are added; see `VisionModel`."""

    language: ClassVar[str] = ""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        super().__init__(config, build)
        assert isinstance(config.vision, Qwen3Config)
        self.tower = Qwen3Tower(config.vision.tower, self.whole(build).within(_TOWER))
        self.has({_TOWER: self.tower})

    def ignores_of_parts(self, name: str) -> bool:
        """Angles that the tower computes."""
        return name.endswith(".inv_freq")

    def encode_image(self, image: torch.Tensor, original: tuple[int, int] | None) -> Encoding:
        """The embeddings that take the places of an image's placeholders, and what is added after the first layers."""
        return self.tower(image)


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """The same with a Qwen3-MoE decoder, whose checkpoints hold one tensor for all experts of a layer."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        super().__init__(config, build)
        assert config.experts is not None
        self._num_experts = config.experts.count

    def weights(self) -> Weights:
        """Every tensor that the checkpoint must have, by name."""
        return experts_together(super().weights(), self._num_experts, in_turn=False, turns=True)
