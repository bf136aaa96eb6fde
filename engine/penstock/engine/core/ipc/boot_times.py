"""What a start is spent on."""

import time


class BootTimes:
    """Seconds of each part of a start, in their order, from now on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, part: str) -> None:
        """That part has just ended; the next begins."""
        now = time.monotonic()
        self.seconds[part], self._last = now - self._last, now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"
