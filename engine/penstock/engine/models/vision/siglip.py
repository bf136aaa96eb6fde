"""SigLIP's vision transformer (Zhai et al., 2023), without the head that pools its features."""

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.layers.norm import LayerNorm
from penstock.engine.models.layers.weight import Weight, Weights, prefixed
from penstock.engine.models.model import Encoding
from penstock.engine.models.vision.config import TowerConfig
from penstock.engine.models.vision.layer import PatchEmbedding, VisionLayer


class SiglipTower:
    """Patches to features.

    Args:
        config: Its shape.
        build: Of one rank that has all of it.
    """

    def __init__(self, config: TowerConfig, build: Build) -> None:
        hidden, device = config.hidden_size, {"dtype": build.dtype, "device": build.device}
        self.patches = PatchEmbedding(config, True, build.within("embeddings"))
        self.position_embedding = torch.empty(config.num_patches, hidden, **device)
        self.layers = [VisionLayer(config, build.within(f"encoder.layers.{at}")) for at in range(config.num_layers)]
        self.post_layernorm = LayerNorm("post_layernorm", hidden, config.norm_eps, True, build.device)

    def weights(self) -> Weights:
        """The tower's, without a prefix."""
        positions = Weight(tuple(self.position_embedding.shape), self._load_positions)
        found = prefixed("embeddings", self.patches.weights() | {"position_embedding.weight": positions})
        for at, layer in enumerate(self.layers):
            found |= prefixed(f"encoder.layers.{at}", layer.weights())
        return found | self.post_layernorm.weights()

    def _load_positions(self, value: torch.Tensor) -> None:
        self.position_embedding.copy_(value)

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for part in (self.patches, *self.layers):
            part.finish()

    def __call__(self, image: torch.Tensor) -> Encoding:
        """[size, size, 3], normalised → in the end [patches, hidden]."""
        hidden = self.patches(image) + self.position_embedding
        for at, layer in enumerate(self.layers):
            yield at / len(self.layers)
            hidden = layer(hidden)
        return self.post_layernorm(hidden)
