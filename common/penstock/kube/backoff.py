"""Waiting longer after each failure, with jitter so that many clients of one server do not come back at once."""

from random import Random


class Backoff:
    """Delays in seconds that double from `first` to `longest`, each drawn from the upper half of its step."""

    def __init__(self, first: float = 0.2, longest: float = 30.0, random: Random | None = None) -> None:
        self._first = first
        self._longest = longest
        self._random = random or Random()
        self._step = first

    def next(self) -> float:
        """The delay after one more failure."""
        delay = self._step * (1 + self._random.random()) / 2
        self._step = min(self._longest, self._step * 2)
        return delay

    def reset(self) -> None:
        """Start again with the first delay, after a success."""
        self._step = self._first
