"""What towers are made of: patches of an image as rows, and layers in which every patch sees every other."""

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from penstock.engine.models.layers.norm import LayerNorm
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weights, prefixed
from penstock.engine.models.vision.config import TowerConfig


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """In the place of `x`, some rows at a time: what three operations pass on stays in the cache."""
    for part in x.split(_ROWS):
        part.mul_((1.702 * part).sigmoid_())
    return x


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ROWS: Final = 64

ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "quick_gelu": _quick_gelu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}
"""They may write over what they are given."""


class PatchEmbedding:
    """Squares of a square image, row by row, to hidden states."""

    def __init__(self, config: TowerConfig, bias: bool, build: Build) -> None:
        self._patch, self._side = config.patch_size, config.image_size // config.patch_size
        self._hidden, self._dtype = config.hidden_size, build.dtype
        span = Span(config.hidden_size, 0, config.hidden_size)
        self.linear = ColumnParallelLinear("patch_embedding", 3 * self._patch**2, {"patch_embedding": span}, bias, build)

    def weights(self) -> Weights:
        """Those of a convolution: one whose windows do not overlap is a product with each of them."""
        found = self.linear.weights()
        flat = found["patch_embedding.weight"]
        shape = (self._hidden, 3, self._patch, self._patch)
        found["patch_embedding.weight"] = flat._replace(shape=shape, load=lambda value: flat.load(value.flatten(1)), part=None)
        return found

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self.linear.finish()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """[size, size, 3], normalised → [patches, hidden]."""
        patch, side = self._patch, self._side
        windows = image[: side * patch, : side * patch].view(side, patch, side, patch, 3).permute(0, 2, 4, 1, 3)
        return self.linear(windows.reshape(side * side, -1).to(self._dtype))


class VisionAttention:
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
        """Bring the weights into the kernels' form, after loading."""
        self.qkv_proj.finish()
        self.out_proj.finish()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        heads = self.qkv_proj(hidden).view(len(hidden), 3, self._heads, -1).permute(1, 2, 0, 3)
        # An image always has as many patches, and no neighbours: the order of the sums cannot change with a batch.
        mixed = F.scaled_dot_product_attention(heads[0, None], heads[1, None], heads[2, None])
        return self.out_proj(mixed[0].transpose(0, 1).flatten(1))


class VisionLayer:
    """Attention and MLP, each normalised before and added to the stream."""

    def __init__(self, config: TowerConfig, build: Build) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        mlp = build.within("mlp")
        self.layer_norm1 = LayerNorm("layer_norm1", hidden, config.norm_eps, True, build.device)
        self.layer_norm2 = LayerNorm("layer_norm2", hidden, config.norm_eps, True, build.device)
        self.self_attn = VisionAttention(config, build.within("self_attn"))
        self.fc1 = ColumnParallelLinear("fc1", hidden, {"fc1": Span(inner, 0, inner)}, True, mlp)
        self.fc2 = RowParallelLinear("fc2", Span(inner, 0, inner), hidden, True, mlp)
        self._activation = ACTIVATIONS[config.activation]

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        found = self.layer_norm1.weights() | self.layer_norm2.weights()
        return found | prefixed("self_attn", self.self_attn.weights()) | prefixed("mlp", self.fc1.weights() | self.fc2.weights())

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for part in (self.self_attn, self.fc1, self.fc2):
            part.finish()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        hidden = self.self_attn(self.layer_norm1(hidden)).add_(hidden)
        return self.fc2(self._activation(self.fc1(self.layer_norm2(hidden)))).add_(hidden)
