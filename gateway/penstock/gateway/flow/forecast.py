"""When trying again makes sense: the tokens ahead at the pace measured, or what is left of a start. Pure; time is an argument."""

import math

WINDOW_S = 10.0
"""Over which the pace is averaged."""
START_S = 30.0
"""How long the first replica of a model takes to become ready, until that has been seen."""
SHORTEST_S = 1
LONGEST_S = 300


class Pace:
    """Tokens a second that go on to a model's replicas: an exponentially weighted average."""

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._level = 0.0
        self._pressed = 0.0

    def add(self, tokens: int, now: float, pressed: bool) -> None:
        """`tokens` went on; `pressed`: others wait, so that the pace is all that the replicas can do."""
        self._level = self._level * math.exp((self._at - now) / WINDOW_S) + tokens
        self._at = now
        if pressed:
            self._pressed = self.rate(now)

    def rate(self, now: float) -> float:
        """Tokens a second; 0 where nothing was seen."""
        seen = max(now - self._began, 1.0)
        return self._level * math.exp((self._at - now) / WINDOW_S) / (WINDOW_S * -math.expm1(-seen / WINDOW_S))

    def capacity(self, now: float) -> float:
        """What the replicas can do, as far as was seen: with little to do they have shown little."""
        return max(self.rate(now), self._pressed)


class Forecast:
    """One model's."""

    def __init__(self, now: float) -> None:
        self.pace = Pace(now)
        self._start_s = START_S
        self._starting_since: float | None = None

    def starting(self, now: float) -> None:
        """Requests wait and no replica is ready."""
        if self._starting_since is None:
            self._starting_since = now

    def ready(self, now: float) -> None:
        """A replica is ready."""
        if self._starting_since is not None:
            self._start_s = now - self._starting_since
            self._starting_since = None

    def abandoned(self) -> None:
        """Drop the running measurement of a start: no request waits for it any more."""
        self._starting_since = None

    def retry_after_s(self, tokens_ahead: int, now: float) -> int:
        """Whole seconds after which `tokens_ahead` will have gone. A start that takes longer than the last one is expected to
        take half as long again as it has."""
        wait = 0.0
        if self._starting_since is not None:
            elapsed = now - self._starting_since
            wait = max(self._start_s - elapsed, elapsed / 2)
        capacity = self.pace.capacity(now)
        if capacity > 0:
            wait += tokens_ahead / capacity
        return min(max(math.ceil(wait), SHORTEST_S), LONGEST_S)
