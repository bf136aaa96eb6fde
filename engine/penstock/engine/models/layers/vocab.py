"""The two ends of a decoder: token embedding and LM head."""

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import ColumnParallelLinear
from penstock.engine.models.layers.linear_method import LinearMethod
from penstock.engine.models.layers.shard import Shard
from penstock.engine.models.layers.weight import Weight, Weights


class VocabEmbedding:
    """Token ids to vectors; every rank holds the whole table, so that a look-up needs no exchange."""

    def __init__(self, vocab_size: int, hidden_size: int, build: Build) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=build.dtype, device=build.device)
        self._ops = build.ops

    def weights(self) -> Weights:
        """Under `embed_tokens.weight`."""
        return {"embed_tokens.weight": Weight(tuple(self.weight.shape), self._load)}

    def _load(self, value: torch.Tensor) -> None:
        self.weight.copy_(value)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, hidden]."""
        return self._ops.embedding(self.weight, input_ids)


class LMHead(ColumnParallelLinear):
    """Hidden states to logits, in a weight of its own or the embedding's."""

    def __init__(self, hidden_size: int, vocab_size: int, shard: Shard, method: LinearMethod, dtype: torch.dtype) -> None:
        super().__init__("lm_head", hidden_size, vocab_size, False, shard, method, dtype)

    def tie(self, embedding: VocabEmbedding) -> None:
        """Takes the embedding's weight instead of one from the checkpoint."""
        self._method.tie(self._shard.narrow(embedding.weight, 0))
