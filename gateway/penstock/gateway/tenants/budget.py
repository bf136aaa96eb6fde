"""Token buckets. Pure; time is an argument."""


class Bucket:
    """A token bucket that refills at a rate per minute and holds one minute's worth.

    The cost of a request may be known only at its end, so the bucket may be overdrawn: it then serves nothing until the debt is
    paid, and over time no more leaves than flows in.

    Args:
        per_minute: The rate.
        now: Monotonic seconds.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def resize(self, per_minute: float, now: float) -> None:
        """Change the rate."""
        self._flow(now)
        self.per_minute = per_minute
        self._level = min(self._level, per_minute)

    def take(self, amount: float, now: float) -> None:
        """Takes out `amount`; a negative one is given back."""
        self._flow(now)
        self._level = min(self._level - amount, self.per_minute)

    def wait_s(self, now: float) -> float:
        """Seconds until there is anything in it; 0: there is."""
        self._flow(now)
        return max(1.0 - self._level, 0.0) * 60.0 / self.per_minute

    def _flow(self, now: float) -> None:
        self._level = min(self._level + max(now - self._at, 0.0) * self.per_minute / 60.0, self.per_minute)
        self._at = max(now, self._at)
