"""The waiting requests of one model: bands by priority, the smallest number first."""

from collections.abc import Iterator

from penstock.gateway.flow.band import Band
from penstock.gateway.flow.ticket import Ticket

PATIENCE = 32
"""Requests served in order before one of the band that was passed over as often. This gives priority without starvation: all
other bands together get one turn in this many."""


class ModelQueue:
    """All that waits for one model."""

    def __init__(self) -> None:
        self.bands: dict[int, Band] = {}
        """Bands that are not empty."""
        self._in_order = 0
        """Requests of the most important band that have gone since one of another did."""

    def __iter__(self) -> Iterator[Ticket]:
        for band in self.bands.values():
            yield from band

    def __bool__(self) -> bool:
        return bool(self.bands)

    def push(self, ticket: Ticket) -> None:
        """One more."""
        self.bands.setdefault(ticket.priority, Band()).push(ticket)

    def pop(self) -> Ticket:
        """The next one: of the most important band, or, after `PATIENCE` of those, of the one that was passed over most."""
        number, self._in_order = min(self.bands), self._in_order + 1
        if self._in_order > PATIENCE:
            patient = max(self.bands, key=lambda other: (self.bands[other].passed_over, -other))
            if self.bands[patient].passed_over >= PATIENCE:
                number, self._in_order = patient, 0
        for other, band in self.bands.items():
            if other > number:
                band.passed_over += 1
        band = self.bands[number]
        band.passed_over = 0
        ticket = band.pop()
        self._tidy(number)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Takes out one that waits here."""
        self.bands[ticket.priority].remove(ticket)
        self._tidy(ticket.priority)

    def charge(self, priority: int, tenant: str, cost: float) -> None:
        """See `Band.charge`; nothing where the band has run empty since, and with it everybody's debts."""
        band = self.bands.get(priority)
        if band is not None:
            band.charge(tenant, cost)

    def tokens_before(self, priority: int) -> int:
        """Tokens of what waits and goes before a newcomer of `priority`."""
        return sum(band.tokens for number, band in self.bands.items() if number <= priority)

    def _tidy(self, number: int) -> None:
        if not self.bands[number]:
            del self.bands[number]
