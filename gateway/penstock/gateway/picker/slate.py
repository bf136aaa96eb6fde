"""One pick as figures: the request's, and the columns of those who may take it."""

from collections.abc import Sequence
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.api.fleet import Replica, Weights
from penstock.gateway.picker.columns import Columns, Seats
from penstock.gateway.picker.figures import Bools, Figures, Floats, Rates, Rows, at
from penstock.gateway.picker.request import RequestFigures, RequestView

_SPREAD, _MIX, _SHIFT, _WORD = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 33, 0xFFFFFFFFFFFFFFFF
_MIX_64, _SHIFT_64 = np.uint64(_MIX), np.uint64(_SHIFT)
DEFAULTS = Weights()


class Slate(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a policy decides on; no prompt is in it. Arrays have one element a row of the model's `Columns`."""

    request: RequestFigures
    now: float
    turn: int
    """Number of the pick among those of the model."""
    table: Floats
    """The figures, one row each."""
    figures: Figures
    open: Bools
    """The rows that may be picked."""
    candidates: int
    """How many they are."""
    resident: Floats
    """Prompt tokens whose computation each replica saves: those in its prefix cache, and of those in slower tiers the share of
    their time that a load saves."""
    found: Floats
    """Prompt tokens that each replica would not compute."""
    last_resorts: Bools | None
    """Rows to pick only where there is no other; None where there are none."""
    adapter: str | None
    """That the request names."""
    lora_s: Floats | None
    """Seconds until the request's adapter is in a slot; None where it names none."""
    encoder_s: Floats | None
    """Seconds of a vision tower for the images that are not in a replica's prefix cache; None where there are no images."""
    weights: Weights
    columns: Columns
    """The source of the figures."""
    rates: Rates
    seeds: NDArray[np.uint64]
    by_name: Rows
    replicas: Sequence[Replica | None]
    endpoints: Sequence[str]

    @property
    def other_s(self) -> Floats | None:
        """Seconds before the first token that are not the prompt's own: the adapter's and the images'. None: there are none."""
        if self.lora_s is None or self.encoder_s is None:
            return self.lora_s if self.encoder_s is None else self.encoder_s
        return self.lora_s + self.encoder_s

    def lots(self, rows: Rows) -> Floats:
        """A number in [0, 1) for each of `rows`, which differs by request and replica: ties spread and yet repeat."""
        mixed = (self.seeds[rows] ^ np.uint64(self.word())) * _MIX_64
        mixed ^= mixed >> _SHIFT_64
        mixed *= _MIX_64
        return (mixed >> _SHIFT_64).astype(np.float64) * 2.0**-31

    def lots_of_few(self, rows: Sequence[int]) -> list[float]:
        """The same numbers, more quickly where there are few."""
        word, lots = self.word(), list[float]()
        for seed in at(self.seeds, rows):
            mixed = (seed ^ word) * _MIX & _WORD
            mixed = (mixed ^ mixed >> _SHIFT) * _MIX & _WORD
            lots.append((mixed >> _SHIFT) * 2.0**-31)
        return lots

    def word(self) -> int:
        """What the request's lots are drawn from; see `word_of`."""
        return word_of(self.request.id)

    def kept(self, rows: list[int], table: Floats) -> "Slate":
        """Return the slate of `rows` only, in that order, with `table` as their figures."""
        return msgspec.structs.replace(
            self,
            table=table,
            figures=Figures(*table),
            open=self.open[rows],
            resident=self.resident[rows],
            found=self.found[rows],
            last_resorts=None if self.last_resorts is None else self.last_resorts[rows],
            lora_s=None if self.lora_s is None else self.lora_s[rows],
            encoder_s=None if self.encoder_s is None else self.encoder_s[rows],
            seeds=self.seeds[rows],
            by_name=np.array(rows, np.intp),
            replicas=[self.replicas[row] for row in rows],
            endpoints=[self.endpoints[row] for row in rows],
        )


def word_of(request_id: str) -> int:
    """What a request's lots are drawn from: a CRC-32, spread over 64 bits."""
    return crc32(request_id.encode()) * _SPREAD & _WORD


def slate_of(
    request: RequestView,
    columns: Columns,
    open: Bools,
    resident: Floats,
    now: float,
    turn: int,
    weights: Weights = DEFAULTS,
    *,
    found: Floats | None = None,
) -> Slate:
    """The slate of `request` among the rows `open` of `columns`; `found`: None where no tier holds any of it."""
    found = resident if found is None else found
    return _slate(
        *(request.figures, columns, columns.seats, open, resident, now, turn, weights, columns.rates(now)),
        found=found,
        last_resorts=columns.last_resorts(now),
        adapter=request.adapter,
        lora_s=None if request.adapter is None else columns.lora_s(request.adapter),
        encoder_s=_encoder_s(request, columns, found),
    )


def slate_of_all(
    request: RequestFigures,
    columns: Columns,
    seats: Seats,
    resident: Floats,
    now: float,
    turn: int,
    weights: Weights,
    rates: Rates,
) -> Slate:
    """The slate of a request with neither an adapter nor images among all rows of `seats` that may take requests, none of them a
    last resort."""
    return _slate(request, columns, seats, seats.open, resident, now, turn, weights, rates, found=resident)


def _slate(
    request: RequestFigures,
    columns: Columns,
    seats: Seats,
    open: Bools,
    resident: Floats,
    now: float,
    turn: int,
    weights: Weights,
    rates: Rates,
    *,
    found: Floats,
    last_resorts: Bools | None = None,
    adapter: str | None = None,
    lora_s: Floats | None = None,
    encoder_s: Floats | None = None,
) -> Slate:
    return Slate(
        request=request,
        now=now,
        turn=turn,
        table=seats.table,
        figures=seats.figures,
        open=open,
        candidates=seats.open_count if open is seats.open else int(np.count_nonzero(open)),
        resident=resident,
        found=found,
        last_resorts=last_resorts,
        adapter=adapter,
        lora_s=lora_s,
        encoder_s=encoder_s,
        weights=weights,
        columns=columns,
        rates=rates,
        seeds=seats.seeds,
        by_name=seats.by_name,
        replicas=seats.replicas,
        endpoints=seats.endpoints,
    )


def _encoder_s(request: RequestView, columns: Columns, found: Floats) -> Floats | None:
    """A run at the speed of a prefill: its cost is told in tokens of text."""
    if not request.images:
        return None
    tokens = np.zeros(len(found))
    for end, cost in request.images:
        tokens += cost * (found < end)
    return tokens * columns.figures.s_per_token
