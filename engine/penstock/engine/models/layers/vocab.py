"""The two ends of a decoder: token embedding and LM head."""

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import ColumnParallelLinear
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
    """Hidden states to logits, in a weight of its own or the embedding's. Each rank computes the logits of a part of the
    vocabulary, padded where it does not divide."""

    def __init__(self, hidden_size: int, vocab_size: int, build: Build) -> None:
        super().__init__("lm_head", hidden_size, {"lm_head": build.shard.padded(vocab_size)}, False, build)
        self._comm = build.comm

    def tie(self, embedding: VocabEmbedding) -> None:
        """Takes the embedding's weight instead of one from the checkpoint."""
        self._method.tie(self.layer.projections[0].outputs.narrow(embedding.weight, 0))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, vocab], on all ranks."""
        logits, vocabulary = self._comm.all_gather(super().__call__(x)), self.layer.projections[0].outputs.total
        return logits if logits.shape[1] == vocabulary else logits[:, :vocabulary]
