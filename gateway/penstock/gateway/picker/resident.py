"""A column from the bits of the residency index: how many prompt tokens each replica's cache would supply."""

from collections.abc import Collection, Iterable

import numpy as np

from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.figures import Bools, Floats, Rows
from penstock.gateway.picker.request import Prompt
from penstock.gateway.residency.index import ResidencyIndex


class ResidentColumn:
    """The look-up for one model. The index knows replicas by bits of its own: which row a bit means is worked out only when
    either side has changed."""

    def __init__(self, residency: ResidencyIndex, columns: Columns) -> None:
        self._residency = residency
        self._columns = columns
        self._of = (-1, -1)
        self._rows: Rows = np.zeros(0, np.intp)
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
            self._residency.add_tokens(prompt.block_hashes, most, block_size, rows, tokens)
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

    def _rows_by_bit(self) -> Rows:
        of = self._residency.version, self._columns.version
        if self._of != of:
            self._of = of
            self._rows = np.array(self._residency.rows_by_bit(self._columns.rows), np.intp)
        return self._rows
