"""Memory that sampling on a device works in: allocated once, so that addresses stay and nothing is allocated in a step."""

from dataclasses import dataclass, field
from enum import IntEnum

import torch

CHUNK = 128
"""Neighbouring tokens whose probability is added up first; a tile takes every n-th chunk, so that the many likely tokens with
small ids do not share one."""
TILES = 64
"""Tiles that a row has at most: a program each."""
CANDIDATES = 64
"""Likeliest tokens that each tile hands on: a filter that keeps no more needs no second look at the row."""


class Path(IntEnum):
    """What a launch can do; each serves what those before it serve, and costs more."""

    GREEDY = 0
    """No row draws."""
    RANDOM = 1
    """Some draw, from all tokens."""
    FILTERED = 2
    """Some draw from what min_p, top_k and top_p leave."""


class Column(IntEnum):
    """Of a result's rows, int32."""

    TOKEN = 0
    """Always one of the vocabulary, whatever the logits are."""
    NANS = 1
    """How many logits are NaN."""
    INFINITIES = 2
    """How many are infinite; of masked logits how many are +inf."""
    NOTHING_LEFT = 3
    """1: every token is masked."""


RESULT = len(Column)


def tile_size(vocab_size: int) -> int:
    """Tokens of a tile: a power of two."""
    size = CHUNK
    while size * TILES < vocab_size:
        size *= 2
    return size


@dataclass(frozen=True)
class SamplingBuffers:
    """Room for up to m rows of logits.

    A tile t of T has the chunks t, t + T, t + 2T, …; tokens within it are in ascending order.
    """

    result: torch.Tensor
    """[m, RESULT], int32: see Column."""
    threshold: torch.Tensor
    """[m], float32: the least logit that filters have left, after temperature; -inf: all are left. With `last_id` it says what
    `processed` logprobs are of."""
    last_id: torch.Tensor
    """[m], int32: of the tokens with exactly that logit those up to this id are left."""
    tile_max: torch.Tensor
    """[m, T], float32: as the model gave it."""
    tile_argmax: torch.Tensor
    """[m, T], int32: the smallest id that has it."""
    tile_bad: torch.Tensor
    """[m, T], int32: how many are NaN, and 65536 times how many are infinite."""
    tile_cut: torch.Tensor
    """[m, T], float32: no token that is not a candidate is above it."""
    chunk_mass: torch.Tensor
    """[m, chunks], float32: sum of e^(logit - greatest of the tile), after temperature."""
    candidates: torch.Tensor
    """[m, T, CANDIDATES], float32: logits as the model gave them, in no order."""
    candidate_ids: torch.Tensor
    """[m, T, CANDIDATES], int32; -1 pads, with -inf."""
    wide: torch.Tensor
    """[m], int32: 1 where the candidates do not suffice."""
    _parts: dict[int, torch.Tensor] = field(default_factory=dict)
    """Number of rows → the first of `result`."""

    def rows(self, count: int) -> torch.Tensor:
        """[count, RESULT]: the first of `result`. A step has few numbers of rows, and to cut them anew costs a small one."""
        found = self._parts.get(count)
        if found is None:
            found = self._parts[count] = self.result[:count]
        return found

    @staticmethod
    def allocate(rows: int, vocab_size: int, device: torch.device, candidates: int = CANDIDATES) -> "SamplingBuffers":
        """For `rows` rows of logits at a time; `candidates` a tile, a power of two."""
        chunks = -(-vocab_size // CHUNK)
        tiles = -(-chunks // (tile_size(vocab_size) // CHUNK))

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return SamplingBuffers(
            result=ints(rows, RESULT),
            threshold=floats(rows),
            last_id=ints(rows),
            tile_max=floats(rows, tiles),
            tile_argmax=ints(rows, tiles),
            tile_bad=ints(rows, tiles),
            tile_cut=floats(rows, tiles),
            chunk_mass=floats(rows, chunks),
            candidates=floats(rows, tiles, candidates),
            candidate_ids=ints(rows, tiles, candidates),
            wide=ints(rows),
        )
