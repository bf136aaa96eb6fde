"""Qwen3-VL's vision transformer (Bai et al., 2025): images of any size, in which every patch sees every other, a table of
positions that is stretched over an image, and features of some layers beside those of the last (DeepStack, Meng et al., 2024)."""

import torch
import torch.nn.functional as F

from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from penstock.engine.models.layers.norm import LayerNorm
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weight, Weights, prefixed
from penstock.engine.models.model import Encoding
from penstock.engine.models.vision.config import Qwen3TowerConfig
from penstock.engine.models.vision.qwen import Segments, VisionAttention, angles_of, patches_by_square, places_by_square

_EPS = 1e-6


def _linear(name: str, inputs: int, outputs: int, build: Build) -> ColumnParallelLinear:
    return ColumnParallelLinear(name, inputs, {name: Span(outputs, 0, outputs)}, True, build)


class Qwen3VisionLayer:
    """Attention and an MLP, each normalised before and added to the stream."""

    def __init__(self, config: Qwen3TowerConfig, build: Build) -> None:
        hidden, inner, mlp = config.hidden_size, config.intermediate_size, build.within("mlp")
        self.attn = VisionAttention(config, build)
        self.norm1 = LayerNorm("norm1", hidden, _EPS, True, build.device)
        self.norm2 = LayerNorm("norm2", hidden, _EPS, True, build.device)
        self.fc1 = _linear("linear_fc1", hidden, inner, mlp)
        self.fc2 = RowParallelLinear("linear_fc2", Span(inner, 0, inner), hidden, True, mlp)

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        found = self.norm1.weights() | self.norm2.weights() | self.attn.weights()
        return found | prefixed("mlp", self.fc1.weights() | self.fc2.weights())

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for part in (self.attn, self.fc1, self.fc2):
            part.finish()

    def __call__(self, hidden: torch.Tensor, segments: Segments, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        hidden = hidden + self.attn(self.norm1(hidden), segments, cos, sin)
        return hidden + self.fc2(F.gelu(self.fc1(self.norm2(hidden)), approximate="tanh"))


class Merger:
    """Squares of patches to embeddings of the decoder.

    Args:
        config: The tower's.
        whole: Whether the norm is over a square, not over each patch.
        build: Within the merger's name.
    """

    def __init__(self, config: Qwen3TowerConfig, whole: bool, build: Build) -> None:
        self._merged, self._whole = config.hidden_size * config.merge_size**2, whole
        self.norm = LayerNorm("norm", self._merged if whole else config.hidden_size, _EPS, True, build.device)
        self.fc1 = _linear("linear_fc1", self._merged, self._merged, build)
        self.fc2 = _linear("linear_fc2", self._merged, config.out_size, build)

    def weights(self) -> Weights:
        """The merger's, without a prefix."""
        return self.norm.weights() | self.fc1.weights() | self.fc2.weights()

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self.fc1.finish()
        self.fc2.finish()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[patches, hidden] → [squares, the decoder's hidden]."""
        squares = hidden.view(-1, self._merged)
        normalised = self.norm(squares) if self._whole else self.norm(hidden).view(-1, self._merged)
        return self.fc2(F.gelu(self.fc1(normalised)))


class Qwen3Tower:
    """Patches to embeddings, one for each square of them.

    Args:
        config: Its shape.
        build: Of one rank that has all of it.
    """

    def __init__(self, config: Qwen3TowerConfig, build: Build) -> None:
        self._config, self._dtype = config, build.dtype
        hidden, pixels = config.hidden_size, 3 * config.temporal_patch_size * config.patch_size**2
        self.proj = _linear("proj", pixels, hidden, build.within("patch_embed"))
        self.positions = torch.empty(config.positions_per_side**2, hidden, dtype=build.dtype, device=build.device)
        self.blocks = [Qwen3VisionLayer(config, build.within(f"blocks.{at}")) for at in range(config.num_layers)]
        self.merger = Merger(config, False, build.within("merger"))
        self.deep = [Merger(config, True, build.within(f"deepstack_merger_list.{at}")) for at in range(len(config.deep_layers))]

    def weights(self) -> Weights:
        """The tower's, without a prefix."""
        config = self._config
        found = prefixed("patch_embed", self.proj.weights())
        flat = found["patch_embed.proj.weight"]
        shape = (config.hidden_size, 3, config.temporal_patch_size, config.patch_size, config.patch_size)
        found["patch_embed.proj.weight"] = flat._replace(shape=shape, load=lambda value: flat.load(value.flatten(1)), part=None)
        found["pos_embed.weight"] = Weight(tuple(self.positions.shape), self._load_positions)
        for at, block in enumerate(self.blocks):
            found |= prefixed(f"blocks.{at}", block.weights())
        for at, merger in enumerate(self.deep):
            found |= prefixed(f"deepstack_merger_list.{at}", merger.weights())
        return found | prefixed("merger", self.merger.weights())

    def _load_positions(self, value: torch.Tensor) -> None:
        self.positions.copy_(value)

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for part in (self.proj, *self.blocks, *self.deep, self.merger):
            part.finish()

    def __call__(self, image: torch.Tensor) -> Encoding:
        """[height, width, 3], normalised → in the end [squares, (1 + deep layers) · the decoder's hidden]."""
        config = self._config
        patch, merge = config.patch_size, config.merge_size
        rows, columns = image.shape[0] // patch, image.shape[1] // patch
        places = places_by_square(rows, columns, merge)
        film = patches_by_square(image, patch, merge, config.temporal_patch_size)
        hidden = self.proj(film.to(self._dtype)) + self._stretched(places, rows, columns)
        angles = angles_of(places, config.hidden_size // config.num_heads // 2)
        cos, sin, deep, whole = angles.cos(), angles.sin(), dict[int, torch.Tensor](), Segments([rows * columns])
        for at, block in enumerate(self.blocks):
            yield at / len(self.blocks)
            hidden = block(hidden, whole, cos, sin)
            if at in config.deep_layers:
                deep[at] = self.deep[config.deep_layers.index(at)](hidden)
        return torch.cat([self.merger(hidden), *(deep[at] for at in sorted(deep))], dim=-1)

    def _stretched(self, places: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The table's positions over an image of so many patches, between neighbours by distance, [patches, hidden]."""
        side = self._config.positions_per_side
        scales = torch.tensor([max(rows - 1, 1), max(columns - 1, 1)], dtype=torch.float32)
        at = places.float() * (side - 1) / scales
        first = at.floor()
        found = torch.zeros(len(places), self.positions.shape[1], dtype=torch.float32)
        for down in (0, 1):
            for right in (0, 1):
                corner = first + torch.tensor([down, right])
                weight = (1 - (at - corner).abs()).clamp(min=0).prod(1)
                row, column = corner.long().clamp(0, side - 1).unbind(1)
                found += self.positions[row * side + column].float() * weight[:, None]
        return found.to(self._dtype)
