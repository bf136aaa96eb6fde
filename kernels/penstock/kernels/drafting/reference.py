"""Drafts by looking back, in plain Python: what the compiled form must give, and what engines without a compiler run."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

PAD = -1
INDEXED = 3
"""Tokens that a history's place must have in common with a row's end to be found."""
PLACES = 64
"""How many places vote at most."""
SOUGHT = 256
"""How many places of a history are compared at most, the latest ones."""


def ngram_drafts(token_ids: Int32, rows: Int32, lengths: Int32, shortest: int, longest: int, most: int) -> Int32:
    """For each row, the tokens after the earliest of the longest earlier occurrences of the row's last tokens (prompt lookup).

    Args:
        token_ids: [R, L].
        rows: [m]: indexes into `token_ids`.
        lengths: [m]: tokens of each of these rows.
        shortest: Tokens that an occurrence must have at least, 1 or more.
        longest: Tokens of an occurrence that are compared at most.
        most: Drafts of a row at most.

    Returns:
        [m, most]: the drafts, then -1.
    """
    drafts = np.full((len(rows), most), PAD, np.int32)
    for at, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        found = common_suffixes(token_ids[row, :length].tolist(), longest)
        best = max(range(1, length), key=lambda back: (found[back], back), default=0)
        if best and found[best] >= shortest:
            following = token_ids[row, length - best : length][:most]
            drafts[at, : len(following)] = following
    return drafts


class SuffixHistory:
    """The outputs of requests that ended, the latest of them.

    Args:
        max_sequences: Outputs that are kept at most.
        capacity: Tokens that are kept at most, one more for each output counted.
        depth: Tokens before a place that are compared at most.
    """

    def __init__(self, max_sequences: int, capacity: int, depth: int) -> None:
        self._max_sequences, self._capacity, self._depth = max_sequences, capacity, depth
        self._sequences: deque[list[int]] = deque()
        self._size = 0

    def add(self, token_ids: Int32) -> None:
        """Keeps an output, [n]; the oldest ones go where there is no room."""
        kept = token_ids[-(self._capacity - 1) :].tolist()
        self._sequences.append(kept)
        self._size += len(kept) + 1
        while len(self._sequences) > self._max_sequences or self._size > self._capacity:
            self._size -= len(self._sequences.popleft()) + 1

    def drafts(self, token_ids: Int32, rows: Int32, lengths: Int32, most: int, factor: float, min_probability: float) -> Int32:
        """For each row, what followed most often where its last tokens stood earlier: in itself or in the outputs that are kept,
        whichever is surer (SuffixDecoding, arXiv 2411.04975).

        Args:
            token_ids: [R, L].
            rows: [m]: indexes into `token_ids`.
            lengths: [m]: tokens of each of these rows.
            most: Drafts of a row at most.
            factor: Drafts per token in common at most.
            min_probability: How frequent a draft and all before it must have been together.

        Returns:
            [m, most]: the drafts, then -1.
        """
        drafts = np.full((len(rows), most), PAD, np.int32)
        for at, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            tokens = token_ids[row, :length].tolist()
            own = vote(*self._own_places(tokens), most, factor, min_probability)
            others = vote(*self._places(tokens), most, factor, min_probability)
            best = others[0] if others[1] > own[1] else own[0]
            drafts[at, : len(best)] = best
        return drafts

    def _own_places(self, tokens: list[int]) -> tuple[int, list[list[int]]]:
        found = common_suffixes(tokens, self._depth)
        longest = max(found[1:], default=0)
        if longest == 0:
            return 0, []
        places = [back for back in range(1, len(tokens)) if found[back] == longest][:PLACES]
        return longest, [tokens[len(tokens) - back :] for back in places]

    def _places(self, tokens: list[int]) -> tuple[int, list[list[int]]]:
        if len(tokens) < INDEXED:
            return 0, []
        ends = [
            (sequence, end)
            for sequence in reversed(self._sequences)
            for end in range(len(sequence), INDEXED - 1, -1)
            if sequence[end - INDEXED : end] == tokens[-INDEXED:]
        ][:SOUGHT]
        same = [_common(tokens, sequence[:end], self._depth) for sequence, end in ends]
        longest = max(same, default=0)
        places = [at for at, count in enumerate(same) if count == longest][:PLACES]
        return longest, [ends[at][0][ends[at][1] :] for at in places]


def vote(
    longest: int, continuations: list[list[int]], most: int, factor: float, min_probability: float
) -> tuple[list[int], float]:
    """The tokens that most of the continuations, the latest first, go on with; and the sum of their frequencies."""
    draft, score, probability = list[int](), 0.0, 1.0
    for at in range(min(most, int(factor * longest))):
        following = [it[at] for it in continuations if at < len(it)]
        if not following:
            break
        token = max(following, key=following.count)  # the first of equally frequent ones
        probability *= following.count(token) / len(continuations)
        if probability < min_probability:
            break
        draft.append(token)
        score += probability
        continuations = [it for it in continuations if at < len(it) and it[at] == token]
    return draft, score


def common_suffixes(tokens: Sequence[int], longest: int) -> list[int]:
    """For each j, how many tokens up to the last but j-th equal those up to the last one; at most `longest`, and 0 for j = 0."""
    return [0, *(_common(tokens, tokens[: len(tokens) - back], longest) for back in range(1, len(tokens)))]


def _common(left: Sequence[int], right: Sequence[int], longest: int) -> int:
    count = 0
    while count < min(longest, len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return count
