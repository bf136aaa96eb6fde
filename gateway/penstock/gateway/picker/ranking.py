"""The rows of a slate in order of preference: by their scores, equal ones by what is on its way, what is cached, and by lot."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.picker.cost import folded_of, horizon, promised_ttft_s
from penstock.gateway.picker.figures import FEW, Bools, Floats, at
from penstock.gateway.picker.slate import Slate

NOISE = 0.001
"""Scores (seconds, for `Cost`) closer than this are equal where a policy tolerates differences at all."""


class Order(NamedTuple):
    """Rows in order of preference, the best first."""

    rows: list[int]
    scores: list[float]
    limit: float
    """Scores up to here count as equal to the best."""
    ttft_s: float
    """The time to the first token that the first row's reports promise; 0: it was not asked for."""


class Ranking(Protocol):
    """Ranks the rows of one slate."""

    def best(self, among: Bools | None, most: int, limit: float | None = None) -> Order:
        """The best `most` of the rows that may be picked and are in `among` (None: of all), last resorts last.

        Args:
            among: bool [rows].
            most: Rows to return at most.
            limit: That of an earlier order; None: by the best of these.
        """
        ...


class ByCompiledPrice:
    """By the price, without numpy."""

    def __init__(self, slate: Slate, tolerance: float, compiled: Compiled) -> None:
        self._slate, self._tolerance, self._compiled = slate, tolerance, compiled

    def best(self, among: Bools | None, most: int, limit: float | None = None) -> Order:
        """The best `most` rows, priced and ranked in one call of the package; see `Ranking`."""
        slate = self._slate
        may = slate.open if among is None else slate.open & among
        everybody = among is None and slate.candidates == len(may)
        ranked = self._compiled.rank(
            folded_of(slate),
            slate.table,
            slate.resident,
            slate.request.prompt_tokens,
            horizon(slate.request.max_tokens),
            slate.seeds,
            slate.word(),
            self._tolerance,
            most,
            slate.other_s,
            None if everybody else _bytes(may),
            None if slate.last_resorts is None else _bytes(slate.last_resorts),
            limit,
        )
        return Order(*ranked)


class ByScore:
    """By scores, float64 [rows].

    Args:
        slate: The rows.
        score: Those of a policy; the least wins.
        tolerance: The policy's.
        promised: The scores are prices, so that the best row promises its first token.
    """

    def __init__(self, slate: Slate, score: Floats, tolerance: float, *, promised: bool = False) -> None:
        self._slate, self._tolerance, self._promised = slate, tolerance, promised
        self._score = score if slate.candidates == len(score) else np.where(slate.open, score, inf)

    def best(self, among: Bools | None, most: int, limit: float | None = None) -> Order:
        """The best `most` rows, ranked by array operations; see `Ranking`."""
        slate, score = self._slate, self._score if among is None else np.where(among, self._score, inf)
        if limit is None:
            limit = _limit(slate, score, self._tolerance)
        if slate.last_resorts is None:
            rows = _order(slate, score, limit, most)
        else:
            rows = _order(slate, np.where(slate.last_resorts, inf, score), limit, most)
            rows += _order(slate, np.where(slate.last_resorts, score, inf), limit, most - len(rows))
        return Order(rows, at(score, rows), limit, promised_ttft_s(slate, rows[0]) if self._promised and rows else 0.0)


def _bytes(mask: Bools) -> NDArray[np.uint8]:
    return mask.view(np.uint8)


def _limit(slate: Slate, score: Floats, tolerance: float) -> float:
    """The score up to which rows are as good as the best; those that may not be picked have the score inf."""
    best = np.minimum.reduce(score)
    if slate.last_resorts is not None and (sound := score[slate.open & ~slate.last_resorts]).size:
        best = sound.min()
    return float(best + max(NOISE, abs(best) * tolerance) if tolerance else best)


def _order(slate: Slate, score: Floats, limit: float, most: int) -> list[int]:
    """The best `most` rows in order, of finite score. Of those as good as the best: less on its way, then more of the prompt in
    its cache, then by lot; the others follow by their scores."""
    ties = _untied(slate, (score <= limit).nonzero()[0].tolist(), most)
    if len(ties) >= most:
        return ties[:most]
    near: Sequence[int] = range(len(score))
    if len(score) > most:  # all that are as good as the last of the best, so that no accident decides among equals
        near = (score <= np.partition(score, most - 1)[most - 1]).nonzero()[0].tolist()
    places = zip(at(score, near), at(slate.seeds, near), near, strict=True)
    rest = sorted([place for place in places if limit < place[0] < inf])
    return ties + [row for _, _, row in rest[: most - len(ties)]]


def _untied(slate: Slate, ties: list[int], most: int) -> list[int]:
    """The best `most` of rows with equal scores, in order."""
    if len(ties) < 2:
        return ties
    # Bookings and tokens are whole numbers, so that neither outweighs the one before it.
    of_booked, booked = slate.request.prompt_tokens + 1.0, slate.figures.booked_requests
    if len(ties) <= FEW:
        known = zip(at(booked, ties), at(slate.resident, ties), slate.lots_of_few(ties), at(slate.seeds, ties), ties, strict=True)
        ranks = sorted([(requests * of_booked - tokens + lot, seed, row) for requests, tokens, lot, seed, row in known])
        return [row for _, _, row in ranks]
    rows = np.array(ties)
    rank = booked[rows] * of_booked - slate.resident[rows] + slate.lots(rows)
    if len(ties) > most:  # all that are as good as the last of the best, so that no accident decides among equals
        near = rank <= np.partition(rank, most - 1)[most - 1]
        rows, rank = rows[near], rank[near]
    return rows[np.lexsort((slate.seeds[rows], rank))][:most].tolist()
