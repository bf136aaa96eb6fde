"""Where the figures of each replica are: in the columns of its model, those that answer apart from those that only prefill."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.api.fleet import Replica
from penstock.gateway.picker.bookings import Bookings
from penstock.gateway.picker.candidates import Booked, ReplicaKey
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.picker.directory import Directory


class Place(NamedTuple):
    """One replica's row."""

    columns: Columns
    row: int


class Places:
    """All columns.

    Args:
        compiled: What prices and ranks their rows; None: Python.
    """

    def __init__(self, compiled: Compiled | None) -> None:
        self._compiled = compiled
        self.answering: dict[str, Columns] = {}
        """By model id."""
        self.prefilling: dict[str, Columns] = {}
        self._places: dict[ReplicaKey, Place] = {}

    def update(self, answering: Mapping[str, Sequence[Replica]], prefilling: Mapping[str, Sequence[Replica]]) -> list[ReplicaKey]:
        """Gives every replica its row, by model id. Returns those whose row is new and blank."""
        before, self._places = self._places, {}
        self.answering = self._placed(self.answering, answering)
        self.prefilling = self._placed(self.prefilling, prefilling)
        return [key for key, place in self._places.items() if before.get(key) != place]

    def _placed(self, old: Mapping[str, Columns], members: Mapping[str, Sequence[Replica]]) -> dict[str, Columns]:
        placed = {model: old.get(model) or Columns(self._compiled) for model in members}
        for model, columns in placed.items():
            columns.update(members[model])
            self._places |= {key: Place(columns, row) for key, row in columns.rows.items()}
        return placed

    def lay_out(self, bookings: Bookings, directory: Directory) -> None:
        """Tells compiled bookings where the figures of each replica are, and what they have to know of it besides."""
        if self._compiled is not None:
            tell: Any = bookings  # of the compiled kind
            tell.placed(
                [
                    (key, it.columns.prices, it.row, it.columns, directory.address_of(key), directory.tells(key))
                    for key, it in self._places.items()
                ]
            )

    def all(self) -> Iterator[Columns]:
        """Those of all models."""
        yield from self.answering.values()
        yield from self.prefilling.values()

    def at(self, key: ReplicaKey) -> Place | None:
        """The row of a replica; None: it belongs to no model."""
        return self._places.get(key)

    def sent(self, key: ReplicaKey) -> None:
        """A request was sent to `key`."""
        if (place := self._places.get(key)) is not None:
            place.columns.sent()

    def booked(self, key: ReplicaKey, booked: Booked) -> None:
        """Work sent to `key` that its reports do not hold yet."""
        if (place := self._places.get(key)) is not None:
            place.columns.booked(place.row, booked)

    def left(self, key: ReplicaKey) -> None:
        """A request has ended at `key` after its last report."""
        if (place := self.at(key)) is not None:
            place.columns.left(place.row)
