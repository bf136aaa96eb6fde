"""Token buckets. Pure; time is an argument."""


class Bucket:
    """So much a minute, and a minute's worth at once after a quiet time.

    What something costs may be known only when it is done, so the bucket may be overdrawn: it serves nobody before the debt is
    paid, and over time no more goes than flows in.

    Args:
        per_minute: What flows in.
        now: Monotonic seconds.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def resize(self, per_minute: float, now: float) -> None:
        """From now on another amount flows in."""
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
