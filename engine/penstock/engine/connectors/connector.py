"""What every connector has in common. Its scheduler's half decides, its ranks move bytes, and a pump stands between them."""

from collections.abc import Sequence
from typing import Protocol

from penstock.engine.connectors.tier_index import Key


class Pump(Protocol):
    """Carries what a scheduler's half decides to the ranks, and what happened there back. A failure costs computation alone."""

    @property
    def is_moving(self) -> bool:
        """Whether a step should pump soon."""
        ...

    def open(self, now: float) -> None:
        """Begins to serve the weights that are loaded; `ConfigError` where that cannot be."""
        ...

    def pump(self, now: float) -> None:
        """Has moves begun that are due, and takes in those that have ended; `now` is Unix time in seconds."""
        ...


class Source(Protocol):
    """A place behind the host's memory, from which a waiting request's pages come. Sources are asked in order."""

    def begin(self, index: int, keys: Sequence[Key], now: float) -> bool:
        """Begins to bring what the host's memory lacks of these pages; False: nothing is on its way."""
        ...

    def take_waits(self, now: float) -> list[int]:
        """Requests that need wait no longer: their pages are there, or do not come."""
        ...
