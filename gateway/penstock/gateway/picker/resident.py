"""Columns from the bits of the residency indexes: how many prompt tokens each replica's cache and tiers would supply."""

from collections.abc import Callable, Collection, Iterable

import numpy as np

from penstock.api.events import Medium
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.figures import Bools, Floats, Rows
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.residency.index import ResidencyIndex
from penstock.gateway.residency.tiers import Tiers


class Resident:
    """What the replicas of one model hold of a prompt."""

    def __init__(self, residency: ResidencyIndex, tiers: Tiers, columns: Columns) -> None:
        self._columns = columns
        self.in_cache = ResidentColumn(residency, columns)
        """The look-up in the index of the KV caches."""
        self._tiers = tiers
        self._in_tiers: dict[Medium, ResidentColumn] = {}

    def cached(self, request: RequestView, comparable: Collection[ReplicaKey] | None) -> Floats:
        """Prompt tokens by row that the KV caches would supply; see `Slates.of` for the arguments. float64 [rows]."""
        return self._found(self.in_cache, request, comparable)

    def with_tiers(
        self,
        cached: Floats,
        request: RequestView,
        comparable: Collection[ReplicaKey] | None,
        load_cost: Callable[[ReplicaKey, Medium], float],
    ) -> tuple[Floats, Floats]:
        """`Slate.resident` and `Slate.found`: the tokens of the KV caches, and those of tiers that replicas would load.

        Args:
            cached: What the KV caches supply; not changed. float64 [rows].
            request: The request.
            comparable: As in `cached`.
            load_cost: Returns a load's time as a share of the time to compute the same tokens; from 1 on, nothing is loaded.
        """
        resident = found = cached
        for medium, index in self._tiers.indexes():
            column = self._in_tiers.get(medium)
            if column is None or column.residency is not index:
                column = self._in_tiers[medium] = ResidentColumn(index, self._columns)
            more = self._found(column, request, comparable) - found
            rows: list[int] = np.flatnonzero(more > 0).tolist()
            if rows and resident is cached:
                resident, found = cached.copy(), cached.copy()
            for row in rows:
                replica = self._columns.replicas[row]
                if replica is not None and (cost := load_cost(key_of(replica), medium)) < 1:
                    resident[row] += (1 - cost) * more[row]
                    found[row] += more[row]
        return resident, found

    def _found(self, column: "ResidentColumn", request: RequestView, comparable: Collection[ReplicaKey] | None) -> Floats:
        tokens = column.tokens(request.prompts, request.block_size, comparable)
        for space in request.elsewhere:
            tokens += column.tokens(space.prompts, space.block_size, space.replicas)
        return tokens


class ResidentColumn:
    """The look-up in one index. The index knows replicas by bits of its own: which row a bit means is worked out only when
    either side has changed."""

    def __init__(self, residency: ResidencyIndex, columns: Columns) -> None:
        self.residency = residency
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
        rows = self.rows_by_bit()
        tokens = np.zeros(len(self._columns.replicas) + 1)  # the last for replicas that are not the model's
        for prompt in prompts:
            if not prompt.block_hashes:
                continue
            most = (prompt.tokens - 1) // block_size
            self.residency.add_tokens(prompt.block_hashes, most, block_size, rows, tokens)
        known = tokens[:-1]
        if among is not None and (mask := self.mask(among)) is not None:
            known *= mask
        return known

    def mask(self, keys: Collection[ReplicaKey]) -> Bools | None:
        """The rows of `keys`, worked out once as long as the same collection comes; None where they are all of them."""
        if self._masked is None or self._masked[0] is not keys or self._masked[1] != self._columns.version:
            rows = self._columns.rows
            mask = np.zeros(len(self._columns.replicas), np.bool_)
            mask[[rows[key] for key in keys if key in rows]] = True
            self._masked = keys, self._columns.version, None if mask.all() else mask
        return self._masked[2]

    def rows_by_bit(self) -> Rows:
        """The row that each bit of the index means."""
        of = self.residency.version, self._columns.version
        if self._of != of:
            self._of = of
            self._rows = np.array(self.residency.rows_by_bit(self._columns.rows), np.intp)
        return self._rows
