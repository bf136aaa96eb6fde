"""Qwen2.5-VL's vision transformer (Bai et al., 2025): images of any size, attention in windows in most layers, and positions by
row and column."""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import ColumnParallelLinear, GateUpParallelLinear, RowParallelLinear
from penstock.engine.models.layers.norm import RMSNorm
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weights, prefixed
from penstock.engine.models.model import Encoding
from penstock.engine.models.vision.config import PatchTowerConfig, QwenTowerConfig

_EPS = 1e-6
_THETA = 10000.0


class Segments(NamedTuple):
    """Patches that see each other, side by side: some of each length, from the same one on."""

    ends: list[int]
    """Where each ends, ascending; the first begins at 0."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[heads, n, d] each → [heads, n, d]. Segments of the same length are one batch."""
        if len(self.ends) == 1:
            return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        out = torch.empty_like(q)
        by_length: dict[int, list[int]] = {}
        for begin, end in pairwise([0, *self.ends]):
            by_length.setdefault(end - begin, []).append(begin)
        for length, begins in by_length.items():
            at = (torch.tensor(begins)[:, None] + torch.arange(length)).to(q.device)
            queries, keys, values = (x[:, at].transpose(0, 1) for x in (q, k, v))
            out[:, at] = F.scaled_dot_product_attention(queries, keys, values).transpose(0, 1)
        return out


class Layout(NamedTuple):
    """How the patches of an image lie."""

    order: torch.Tensor
    """[squares]: squares of patches that become one embedding, window after window."""
    windows: Segments
    whole: Segments
    angles: torch.Tensor
    """[patches, d / 2], in that order."""


def layout(rows: int, columns: int, config: QwenTowerConfig) -> Layout:
    """Of an image of so many patches."""
    merge = config.merge_size
    side, high, wide = config.window_size // merge // config.patch_size, rows // merge, columns // merge
    squares = torch.arange(high * wide).view(high, wide)
    windows = [square.flatten() for band in squares.split(side, 0) for square in band.split(side, 1)]
    order = torch.cat(windows)
    ends = (torch.tensor([len(window) for window in windows]).cumsum(0) * merge**2).tolist()
    size = config.hidden_size // config.num_heads // 2
    places = places_by_square(rows, columns, merge).view(high * wide, merge**2, 2)[order].view(rows * columns, 2)
    return Layout(order, Segments(ends), Segments([rows * columns]), angles_of(places, size))


def places_by_square(rows: int, columns: int, merge: int) -> torch.Tensor:
    """Row and column of each patch, square after square of `merge` x `merge` patches, [patches, 2]."""
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return places.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2).reshape(-1, 2)


def angles_of(places: torch.Tensor, size: int) -> torch.Tensor:
    """[patches, 2] → [patches, size]: the first half of a head's pairs turns by row, the second by column."""
    frequencies = 1.0 / _THETA ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return (places[..., None].float() * frequencies).flatten(1)


def patches_by_square(image: torch.Tensor, patch: int, merge: int, frames: int) -> torch.Tensor:
    """[height, width, 3] → [patches, pixels], square after square: a still image is a film of equal frames."""
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    squares = image.view(rows // merge, merge, patch, columns // merge, merge, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
    film = squares.reshape(rows * columns, 3, 1, patch, patch).expand(-1, -1, frames, -1, -1)
    return film.reshape(rows * columns, -1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[heads, n, d], whose halves are pairs, turned by [n, d / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class VisionAttention:
    """Of patches, whose queries, keys and values are one product."""

    def __init__(self, config: PatchTowerConfig, build: Build) -> None:
        hidden, attn, self._heads = config.hidden_size, build.within("attn"), config.num_heads
        self.qkv = ColumnParallelLinear("qkv", hidden, {"qkv": Span(3 * hidden, 0, 3 * hidden)}, True, attn)
        self.proj = RowParallelLinear("proj", Span(hidden, 0, hidden), hidden, True, attn)

    def weights(self) -> Weights:
        """Of both products, as a layer names them."""
        return prefixed("attn", self.qkv.weights() | self.proj.weights())

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self.qkv.finish()
        self.proj.finish()

    def __call__(self, hidden: torch.Tensor, segments: Segments, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        q, k, v = self.qkv(hidden).view(len(hidden), 3, self._heads, -1).permute(1, 2, 0, 3)
        mixed = segments.attend(rotated(q, cos, sin), rotated(k, cos, sin), v)
        return self.proj(mixed.transpose(0, 1).flatten(1))


class QwenVisionLayer:
    """Attention and a gated MLP, each normalised before and added to the stream."""

    def __init__(self, config: QwenTowerConfig, build: Build) -> None:
        hidden, self._ops = config.hidden_size, build.ops
        self.attn = VisionAttention(config, build)
        self.norm1 = RMSNorm("norm1", hidden, _EPS, build.ops, device=build.device)
        self.norm2 = RMSNorm("norm2", hidden, _EPS, build.ops, device=build.device)
        inner, mlp = config.intermediate_size, build.within("mlp")
        self.gate_up = GateUpParallelLinear(hidden, inner, True, mlp)
        self.down = RowParallelLinear("down_proj", Span(inner, 0, inner), hidden, True, mlp)

    def weights(self) -> Weights:
        """The layer's, without a prefix."""
        found = self.norm1.weights() | self.norm2.weights() | self.attn.weights()
        return found | prefixed("mlp", self.gate_up.weights() | self.down.weights())

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for part in (self.attn, self.gate_up, self.down):
            part.finish()

    def __call__(self, hidden: torch.Tensor, segments: Segments, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, hidden]."""
        hidden = hidden + self.attn(self.norm1(hidden), segments, cos, sin)
        return hidden + self.down(self._ops.silu_mul(self.gate_up(self.norm2(hidden))))


class QwenTower:
    """Patches to embeddings, one for each square of them.

    Args:
        config: Its shape.
        build: Of one rank that has all of it.
    """

    def __init__(self, config: QwenTowerConfig, build: Build) -> None:
        self._config, self._dtype = config, build.dtype
        hidden, merged = config.hidden_size, config.hidden_size * config.merge_size**2
        pixels = 3 * config.temporal_patch_size * config.patch_size**2
        self.proj = ColumnParallelLinear("proj", pixels, {"proj": Span(hidden, 0, hidden)}, False, build.within("patch_embed"))
        self.blocks = [QwenVisionLayer(config, build.within(f"blocks.{at}")) for at in range(config.num_layers)]
        merger = build.within("merger.mlp")
        self.ln_q = RMSNorm("ln_q", hidden, _EPS, build.ops, device=build.device)
        self.first = ColumnParallelLinear("0", merged, {"0": Span(merged, 0, merged)}, True, merger)
        self.second = ColumnParallelLinear("2", merged, {"2": Span(config.out_size, 0, config.out_size)}, True, merger)

    def weights(self) -> Weights:
        """The tower's, without a prefix."""
        config = self._config
        [(name, flat)] = self.proj.weights().items()
        shape = (config.hidden_size, 3, config.temporal_patch_size, config.patch_size, config.patch_size)
        convolution = flat._replace(shape=shape, load=lambda value: flat.load(value.flatten(1)), part=None)
        found = {f"patch_embed.{name}": convolution} | prefixed("merger", self.ln_q.weights())
        for at, block in enumerate(self.blocks):
            found |= prefixed(f"blocks.{at}", block.weights())
        return found | prefixed("merger.mlp", self.first.weights() | self.second.weights())

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for part in (self.proj, *self.blocks, self.first, self.second):
            part.finish()

    def __call__(self, image: torch.Tensor) -> Encoding:
        """[height, width, 3], normalised → in the end [height · width / pixels of a square, the decoder's hidden]."""
        config = self._config
        patch, merge = config.patch_size, config.merge_size
        rows, columns = image.shape[0] // patch, image.shape[1] // patch
        laid = layout(rows, columns, config)
        film = patches_by_square(image, patch, merge, config.temporal_patch_size)
        hidden = self.proj(film.view(-1, merge**2, film.shape[1])[laid.order].flatten(0, 1).to(self._dtype))
        cos, sin = laid.angles.cos(), laid.angles.sin()
        for at, block in enumerate(self.blocks):
            yield at / len(self.blocks)
            hidden = block(hidden, laid.whole if at in config.full_layers else laid.windows, cos, sin)
        merged = self.second(F.gelu(self.first(self.ln_q(hidden).view(len(laid.order), -1))))
        found = torch.empty_like(merged)
        found[laid.order] = merged
        return found
