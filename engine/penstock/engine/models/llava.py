"""LLaVA 1.5 (Liu et al., 2023): a vision tower, a projector of two layers, and a decoder that reads both as tokens."""

import re

import torch
import torch.nn.functional as F

from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.linear import ColumnParallelLinear
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weights
from penstock.engine.models.model import Encoding
from penstock.engine.models.vision.clip import ClipTower
from penstock.engine.models.vision.config import LlavaConfig
from penstock.engine.models.vision.model import ModelWithImages

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"


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
        """Bring the weights into the kernels' form, after loading."""
        self.linear_1.finish()
        self.linear_2.finish()

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """[n, features] → [n, hidden]."""
        return self.linear_2(F.gelu(self.linear_1(features)))


class LlavaForConditionalGeneration(ModelWithImages):
    """A CLIP tower, a projector and a decoder; see `VisionModel`."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        super().__init__(config, build)
        vision, whole = config.vision, self.whole(build)
        assert isinstance(vision, LlavaConfig)
        self._keeps_class = vision.keeps_class
        self.tower = ClipTower(vision.tower, whole.within(_TOWER))
        sizes = vision.tower.hidden_size, config.hidden_size
        self.projector = Projector(*sizes, vision.projector_bias, whole.within(_PROJECTOR))
        self.has({_TOWER: self.tower, _PROJECTOR: self.projector})

    def ignores_of_parts(self, name: str) -> bool:
        """What comes after the tower's features."""
        if name.startswith(f"{_TOWER}.") and re.search(r"\.(post_layernorm\..+|position_ids)$", name):
            return True
        layer = re.match(rf"{_TOWER}\..*?layers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= len(self.tower.layers)

    def encode_image(self, image: torch.Tensor, original: tuple[int, int] | None) -> Encoding:
        """The embeddings that take the places of an image's placeholders."""
        features = yield from self.tower(image)
        return self.projector(features if self._keeps_class else features[1:])
