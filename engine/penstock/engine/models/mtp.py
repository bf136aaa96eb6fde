"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): a layer of the target's own checkpoint, after the last one.

It has the target's kind of decoder layer. The target's embedding and LM head serve it too: checkpoints hold copies of both, which
are not loaded.
"""

from typing import cast

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.build import Build
from penstock.engine.models.draft_head import FusingHead
from penstock.engine.models.head_config import HeadConfig
from penstock.engine.models.layers.weight import Weights, prefixed
from penstock.engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM, make_norm
from penstock.engine.models.model import Carry
from penstock.engine.models.registry import model_class

_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


class MtpHead(FusingHead[LlamaDecoderLayer]):
    """Embedding and state, each normalised, through one projection and one layer; then a norm and the target's LM head."""

    def __init__(self, config: HeadConfig, build: Build) -> None:
        layer = cast("type[LlamaForCausalLM]", model_class(config.architecture)).decoder_layer
        decoder, hidden = config.decoder, config.decoder.hidden_size
        super().__init__(config, layer, 2 * hidden, build, fc=f"{config.layer_name}.eh_proj")
        self.enorm, self.hnorm, self.norm = (make_norm(name, hidden, decoder, build) for name in ("enorm", "hnorm", "norm"))

    def weights(self) -> Weights:
        """Every tensor that the checkpoint must have."""
        own = self.enorm.weights() | self.hnorm.weights() | self.fc.weights() | self.layers[0].weights()
        return prefixed(self.config.layer_name, own | prefixed("shared_head", self.norm.weights()))

    def ignores(self, name: str) -> bool:
        """See DraftHead: all else in the checkpoint is the target's, or a copy of it."""
        before, _, own = name.partition(f"{self.config.layer_name}.")
        return bool(before) or not own or own in _COPIES or super().ignores(name)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """See DraftHead: the first layer takes the state as it is."""
        return states

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass."""
        # Trained without the embedding of the first entry.
        embedded = self.embed(input_ids).masked_fill(positions.eq(0).unsqueeze(-1), 0.0)
        x = self.fc(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        stream = Carry(*self.layers[0](x, None, self.angles(positions), ctx)).stream()
        out = self.norm(stream)
        return out, out if self.config.recycles_normed else stream
