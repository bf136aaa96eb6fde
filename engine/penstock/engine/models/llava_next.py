"""LLaVA-NeXT, also called 1.6 (Liu et al., 2024): LLaVA 1.5 that looks at an image a second time, in tiles of a larger one."""

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.weight import Weight, Weights
from penstock.engine.models.llava import LlavaForConditionalGeneration
from penstock.engine.models.model import Encoding
from penstock.engine.models.vision.config import LlavaNextConfig
from penstock.prompt.image_size import TiledSize

_NEWLINE = "image_newline"


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    """LLaVA 1.5's tower and projector for each tile, and an embedding at the end of each row of the whole; see `VisionModel`."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        super().__init__(config, build)
        vision = config.vision
        assert isinstance(vision, LlavaNextConfig)
        tower = vision.tower
        self._size = TiledSize(tile=tower.image_size, side=tower.image_size // tower.patch_size, resolutions=vision.resolutions)
        self._newline = torch.empty(config.hidden_size, dtype=build.dtype, device=build.device)

    def weights(self) -> Weights:
        """Every tensor that the checkpoint must have, by name."""
        return super().weights() | {_NEWLINE: Weight(tuple(self._newline.shape), self._load_newline)}

    def _load_newline(self, value: torch.Tensor) -> None:
        self._newline.copy_(value)

    def encode_image(self, image: torch.Tensor, original: tuple[int, int] | None) -> Encoding:
        """The embeddings that take the places of an image's placeholders: those of the square, then the rows of the tiles."""
        assert original is not None, "embeddings depend on the size of the image in the file"
        size = self._size
        square, *tiles = image.split(size.tile)
        first = yield from _within(super().encode_image(square, None), 0, 1 + len(tiles))
        width = first.shape[1]
        high, wide = (pixels // size.tile for pixels in size.resolution(*original))
        # A tile is put in its place as soon as it is there, so that memory grows with the embeddings and by no more.
        whole = first.new_empty(high, size.side, wide, size.side, width)
        for at, tile in enumerate(tiles):
            run = super().encode_image(tile, None)
            features = yield from _within(run, 1 + at, 1 + len(tiles))
            whole[at // wide, :, at % wide] = features.view(size.side, size.side, width)
        whole = whole.view(high * size.side, wide * size.side, width)
        rows, columns = size.grid(*original)
        top, left = (len(whole) - rows) // 2, (whole.shape[1] - columns) // 2
        found = first.new_empty(size.tokens(*original), width)
        found[: len(first)] = first
        lines = found[len(first) :].view(rows, columns + 1, width)
        lines[:, :columns] = whole[top : top + rows, left : left + columns]
        lines[:, columns] = self._newline
        return found


def _within(run: Encoding, number: int, count: int) -> Encoding:
    """One of several runs as a part of all."""
    while True:
        try:
            done = next(run)
        except StopIteration as ended:
            return ended.value
        yield (number + done) / count
