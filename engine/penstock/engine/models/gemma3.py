"""Gemma 3 with images (Gemma team, 2025): SigLIP's features, averaged over squares, and a decoder in which the tokens of an image
see each other both ways."""

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.linear import ColumnParallelLinear
from penstock.engine.models.layers.norm import RMSNorm
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weights
from penstock.engine.models.model import Encoding
from penstock.engine.models.vision.config import Gemma3Config
from penstock.engine.models.vision.model import ModelWithImages
from penstock.engine.models.vision.siglip import SiglipTower

_TOWER, _PROJECTOR, _PROJECTION = "vision_tower", "multi_modal_projector", "mm_input_projection_weight"


class Gemma3Projector:
    """From the tower's features to the decoder's embeddings, fewer by the squares that are averaged."""

    def __init__(self, config: Gemma3Config, hidden: int, build: Build) -> None:
        features, patches = config.tower.hidden_size, config.tower.image_size // config.tower.patch_size
        self._shape = features, hidden
        self._side, self._square = config.tokens_per_side, patches // config.tokens_per_side
        self.norm = RMSNorm("mm_soft_emb_norm", features, config.tower.norm_eps, build.ops, 1.0, build.device)
        self.projection = ColumnParallelLinear(_PROJECTION, features, {_PROJECTION: Span(hidden, 0, hidden)}, False, build)

    def weights(self) -> Weights:
        """The projector's, without a prefix; the checkpoint has the projection's inputs first."""
        [flat] = self.projection.weights().values()
        turned = flat._replace(shape=self._shape, load=lambda value: flat.load(value.t().contiguous()), part=None)
        return self.norm.weights() | {_PROJECTION: turned}

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self.projection.finish()

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """[patches, features] → [tokens, hidden]."""
        side, square = self._side, self._square
        averaged = features.view(side, square, side, square, -1).mean((1, 3)).flatten(0, 1)
        return self.projection(self.norm(averaged))


class Gemma3ForConditionalGeneration(ModelWithImages):
    """A SigLIP tower, a projector and a Gemma 3 decoder; see `VisionModel`."""

    def __init__(self, config: DecoderConfig, build: Build) -> None:
        super().__init__(config, build)
        vision, whole = config.vision, self.whole(build)
        assert isinstance(vision, Gemma3Config)
        self.tower = SiglipTower(vision.tower, whole.within(_TOWER))
        self.projector = Gemma3Projector(vision, config.hidden_size, whole.within(_PROJECTOR))
        self.has({_TOWER: self.tower, _PROJECTOR: self.projector})

    def ignores_of_parts(self, name: str) -> bool:
        """The head with which SigLIP was trained."""
        return name.startswith(f"{_TOWER}.") and (".head." in name or name.endswith(".position_ids"))

    def encode_image(self, image: torch.Tensor, original: tuple[int, int] | None) -> Encoding:
        """The embeddings that take the places of an image's placeholders."""
        return self.projector((yield from self.tower(image)))
