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
        pieces, found = image.split(size.tile), list[torch.Tensor]()
        for piece in pieces:
            run = super().encode_image(piece, None)
            found.append((yield from _within(run, len(found), len(pieces))))
        square, *tiles = found
        high, wide = (pixels // size.tile for pixels in size.resolution(*original))
        whole = torch.stack(tiles).view(high, wide, size.side, size.side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        rows, columns = size.grid(*original)
        top, left = (len(whole) - rows) // 2, (whole.shape[1] - columns) // 2
        inside = whole[top : top + rows, left : left + columns]
        ends = self._newline.expand(rows, 1, -1)
        return torch.cat([square, torch.cat([inside, ends], dim=1).flatten(0, 1)])


def _within(run: Encoding, number: int, count: int) -> Encoding:
    """One of several runs as a part of all."""
    while True:
        try:
            done = next(run)
        except StopIteration as ended:
            return ended.value
        yield (number + done) / count
