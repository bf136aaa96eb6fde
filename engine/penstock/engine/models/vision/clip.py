"""CLIP's vision transformer (Radford et al., 2021), up to the layer whose output a language model reads."""

import torch
import torch.nn.functional as F

from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from penstock.engine.models.layers.norm import LayerNorm
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weight, Weights, prefixed
from penstock.engine.models.vision.config import TowerConfig


class ClipAttention:
    """Every patch sees every other."""

    def __init__(self, config: TowerConfig, build: Build) -> None:
        hidden, heads = config.hidden_size, config.num_heads
        self._heads = heads
        self.qkv_proj = QKVParallelLinear(hidden, heads, heads, hidden // heads, True, build)
        self.out_proj = RowParallelLinear("out_proj", Span(hidden, 0, hidden), hidden, True, build)

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        return self.qkv_proj.weights() | self.out_proj.weights()

    def finish(self) -> None:
        """After loading."""
        self.qkv_proj.finish()
        self.out_proj.finish()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        heads = self.qkv_proj(hidden).view(len(hidden), 3, self._heads, -1).permute(1, 2, 0, 3)
        # An image always has as many patches, and no neighbours: the order of the sums cannot change with a batch.
        mixed = F.scaled_dot_product_attention(heads[0, None], heads[1, None], heads[2, None])
        return self.out_proj(mixed[0].transpose(0, 1).flatten(1))


class ClipLayer:
    """Attention and MLP, each normalised before and added to the stream."""

    def __init__(self, config: TowerConfig, build: Build) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        mlp = build.within("mlp")
        self.layer_norm1 = LayerNorm("layer_norm1", hidden, config.norm_eps, True, build.device)
        self.layer_norm2 = LayerNorm("layer_norm2", hidden, config.norm_eps, True, build.device)
        self.self_attn = ClipAttention(config, build.within("self_attn"))
        self.fc1 = ColumnParallelLinear("fc1", hidden, {"fc1": Span(inner, 0, inner)}, True, mlp)
        self.fc2 = RowParallelLinear("fc2", Span(inner, 0, inner), hidden, True, mlp)
        self._activation = {"quick_gelu": _quick_gelu, "gelu": F.gelu}[config.activation]

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        found = self.layer_norm1.weights() | self.layer_norm2.weights()
        return found | prefixed("self_attn", self.self_attn.weights()) | prefixed("mlp", self.fc1.weights() | self.fc2.weights())

    def finish(self) -> None:
        """After loading."""
        for part in (self.self_attn, self.fc1, self.fc2):
            part.finish()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        return hidden + self.fc2(self._activation(self.fc1(self.layer_norm2(hidden))))


class ClipTower:
    """Patches and a class token to features.

    Args:
        config: Its shape.
        build: Of one rank that has all of it.
    """

    def __init__(self, config: TowerConfig, build: Build) -> None:
        self._config, self._dtype = config, build.dtype
        hidden, patch = config.hidden_size, config.patch_size
        embeddings, device = build.within("embeddings"), {"dtype": build.dtype, "device": build.device}
        pixels = 3 * patch * patch
        self.patch_embedding = ColumnParallelLinear(
            "patch_embedding", pixels, {"patch_embedding": Span(hidden, 0, hidden)}, False, embeddings
        )
        self.class_embedding = torch.empty(hidden, **device)
        self.position_embedding = torch.empty(config.num_patches + 1, hidden, **device)
        self.pre_layrnorm = LayerNorm("pre_layrnorm", hidden, config.norm_eps, True, build.device)
        self.layers = [ClipLayer(config, build.within(f"encoder.layers.{at}")) for at in range(config.num_layers)]

    def weights(self) -> Weights:
        """The tower's, without a prefix."""
        hidden, patch = self._config.hidden_size, self._config.patch_size
        [(name, flat)] = self.patch_embedding.weights().items()
        found: Weights = {
            "class_embedding": Weight((hidden,), self._load_class),
            "position_embedding.weight": Weight(tuple(self.position_embedding.shape), self._load_positions),
            # A convolution whose windows do not overlap is a product with each of them.
            name: flat._replace(shape=(hidden, 3, patch, patch), load=lambda value: flat.load(value.flatten(1)), part=None),
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
        """After loading."""
        self.patch_embedding.finish()
        for layer in self.layers:
            layer.finish()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """[size, size, 3], normalised → [1 + patches, hidden]; the class token is the first."""
        patch, side = self._config.patch_size, self._config.image_size // self._config.patch_size
        windows = image[: side * patch, : side * patch].view(side, patch, side, patch, 3).permute(0, 2, 4, 1, 3)
        patches = self.patch_embedding(windows.reshape(side * side, -1).to(self._dtype))
        hidden = torch.cat([self.class_embedding[None], patches]) + self.position_embedding
        hidden = self.pre_layrnorm(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)
