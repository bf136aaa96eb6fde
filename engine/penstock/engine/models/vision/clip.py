"""CLIP's vision transformer (Radford et al., 2021), up to the layer whose output a language model reads."""

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.layers.norm import LayerNorm
from penstock.engine.models.layers.weight import Weight, Weights, prefixed
from penstock.engine.models.model import Encoding
from penstock.engine.models.vision.config import TowerConfig
from penstock.engine.models.vision.layer import PatchEmbedding, VisionLayer


class ClipTower:
    """Patches and a class token to features.

    Args:
        config: Its shape.
        build: Of one rank that has all of it.
    """

    def __init__(self, config: TowerConfig, build: Build) -> None:
        hidden, device = config.hidden_size, {"dtype": build.dtype, "device": build.device}
        self.patches = PatchEmbedding(config, False, build.within("embeddings"))
        self.class_embedding = torch.empty(hidden, **device)
        self.position_embedding = torch.empty(config.num_patches + 1, hidden, **device)
        self.pre_layrnorm = LayerNorm("pre_layrnorm", hidden, config.norm_eps, True, build.device)
        self.layers = [VisionLayer(config, build.within(f"encoder.layers.{at}")) for at in range(config.num_layers)]

    def weights(self) -> Weights:
        """The tower's, without a prefix."""
        found = self.patches.weights() | {
            "class_embedding": Weight(tuple(self.class_embedding.shape), self._load_class),
            "position_embedding.weight": Weight(tuple(self.position_embedding.shape), self._load_positions),
        }
        found = prefixed("embeddings", found) | self.pre_layrnorm.weights()
        for at, layer in enumerate(self.layers):
            found |= prefixed(f"encoder.layers.{at}", layer.weights())
        return found

    def _load_class(self, value: torch.Tensor) -> None:
        self.class_embedding.copy_(value)

    def _load_positions(self, value: torch.Tensor) -> None:
        self.position_embedding.copy_(value)

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for part in (self.patches, *self.layers):
            part.finish()

    def __call__(self, image: torch.Tensor) -> Encoding:
        """[size, size, 3], normalised → in the end [1 + patches, hidden]; the class token is the first."""
        hidden = torch.cat([self.class_embedding[None], self.patches(image)]) + self.position_embedding
        hidden = self.pre_layrnorm(hidden)
        for at, layer in enumerate(self.layers):
            yield at / len(self.layers)
            hidden = layer(hidden)
        return hidden
