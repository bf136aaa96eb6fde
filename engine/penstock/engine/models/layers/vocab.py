"""The two ends of a decoder: token embedding and LM head."""

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import ColumnParallelLinear
from penstock.engine.models.layers.weight import Weight, Weights


class VocabEmbedding:
    """Token ids to vectors. Each rank holds a part of the table's rows, those of its LM head, and gives nothing for other tokens:
    the sum over the ranks is the whole."""

    def __init__(self, vocab_size: int, hidden_size: int, build: Build) -> None:
        self._ops, self._comm, self._alone = build.ops, build.comm, build.shard.world == 1
        self._rows, self._shape = build.shard.padded(vocab_size), (vocab_size, hidden_size)
        # With others, the first row and the last one stand for their tokens.
        rows = self._rows.size + (0 if self._alone else 2)
        self._table = torch.empty(rows, hidden_size, dtype=build.dtype, device=build.device)
        self.weight = self._table if self._alone else self._table[1:-1]
        """[rows of this rank, hidden]; padding is zero."""
        if not self._alone:
            # To add -0 leaves all bits as they are, those of 0 and -0 as well.
            self._table[:: self._rows.size + 1].fill_(-0.0)

    def weights(self) -> Weights:
        """Under `embed_tokens.weight`."""
        return {"embed_tokens.weight": Weight(self._shape, self._load)}

    def _load(self, value: torch.Tensor) -> None:
        self.weight.copy_(self._rows.narrow(value, 0))

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, hidden], on all ranks."""
        if self._alone:
            return self._ops.embedding(self.weight, input_ids)
        rows = (input_ids - (self._rows.start - 1)).clamp(0, self._rows.size + 1)
        return self._comm.all_reduce(self._ops.embedding(self._table, rows))


class LMHead(ColumnParallelLinear):
    """Hidden states to logits, in a weight of its own or the embedding's. Each rank computes the logits of a part of the
    vocabulary, padded where it does not divide."""

    def __init__(self, hidden_size: int, vocab_size: int, build: Build) -> None:
        super().__init__("lm_head", hidden_size, {"lm_head": build.shard.padded(vocab_size)}, False, build)
        self._comm = build.comm

    def tie(self, embedding: VocabEmbedding) -> None:
        """Takes the embedding's weight instead of one from the checkpoint."""
        self._method.tie(embedding.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, vocab], on all ranks."""
        logits, vocabulary = self._comm.all_gather(super().__call__(x)), self.layer.projections[0].outputs.total
        return logits if logits.shape[1] == vocabulary else logits[:, :vocabulary]
