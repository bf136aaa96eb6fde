"""A column from the bits of the residency index: how many prompt tokens each replica's cache would supply."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.figures import Bools, Floats, Rows
from penstock.gateway.picker.request import Prompt
from penstock.gateway.residency.index import ResidencyIndex

FEW = 16
"""Replicas up to which a loop is quicker than array operations."""


class ResidentColumn:
    """The look-up for one model. The index knows replicas by bits of its own: which row a bit means is worked out only when
    either side has changed."""

    def __init__(self, residency: ResidencyIndex, columns: Columns) -> None:
        self._residency = residency
        self._columns = columns
        self._of = (-1, -1)
        self._rows: list[int] = []
        self._array = np.zeros(0, np.intp)
        self._masked: tuple[Collection[ReplicaKey], int, Bools | None] | None = None

    def tokens(self, prompts: Iterable[Prompt], block_size: int, among: Collection[ReplicaKey] | None) -> Floats:
        """Prompt tokens by row: whole blocks, without the last token. float64 [rows].

        Args:
            prompts: Of the request.
            block_size: Tokens in a block of theirs.
            among: The replicas whose caches their hashes can be found in; None: all.
        """
        rows = self._rows_by_bit()
        tokens = np.zeros(len(self._columns.replicas) + 1)  # the last for replicas that are not the model's
        for prompt in prompts:
            if not prompt.block_hashes:
                continue
            most = (prompt.tokens - 1) // block_size
            spans = self._residency.spans(prompt.block_hashes)
            if len(rows) > FEW and sum([bits.bit_count() for bits, _ in spans]) > FEW:
                span, bit = _ones([bits for bits, _ in spans], len(rows))
                supplied = np.array([float(min(depth, most) * block_size) for _, depth in spans])
                tokens[self._array[bit]] += supplied[span]  # at once: no replica is in two spans
                continue
            for bits, depth in spans:
                while bits:
                    lowest = bits & -bits
                    tokens[rows[lowest.bit_length() - 1]] += min(depth, most) * block_size
                    bits ^= lowest
        known = tokens[:-1]
        if among is not None and (mask := self._mask(among)) is not None:
            known *= mask
        return known

    def _mask(self, keys: Collection[ReplicaKey]) -> Bools | None:
        """The rows of `keys`, worked out once as long as the same collection comes; None where they are all of them."""
        if self._masked is None or self._masked[0] is not keys or self._masked[1] != self._columns.version:
            rows = self._columns.rows
            mask = np.zeros(len(self._columns.replicas), np.bool_)
            mask[[rows[key] for key in keys if key in rows]] = True
            self._masked = keys, self._columns.version, None if mask.all() else mask
        return self._masked[2]

    def _rows_by_bit(self) -> list[int]:
        of = self._residency.version, self._columns.version
        if self._of != of:
            self._of = of
            self._rows = self._residency.rows_by_bit(self._columns.rows)
            self._array = np.array(self._rows, np.intp)
        return self._rows


def _ones(words: Sequence[int], width: int) -> tuple[Rows, Rows]:
    """The ones in `words` of up to `width` bits: the numbers of their words, and of their bits."""
    size = (width + 7) // 8
    data = np.frombuffer(b"".join([word.to_bytes(size, "little") for word in words]), np.uint8)
    at = np.unpackbits(data, bitorder="little").view(np.bool_).nonzero()[0]
    word = at // (8 * size)
    return word, at - word * (8 * size)
