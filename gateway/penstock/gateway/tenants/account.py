"""What a tenant uses: its budgets, and what it has running. Pure; time is an argument."""

import math
from typing import Literal

from penstock.gateway.tenants.budget import Bucket
from penstock.gateway.tenants.tenant import Limits

Exceeded = Literal["max_concurrent", "requests_per_minute", "tokens_per_minute"]

REMEMBERED = 0.9
"""Weight of the past in the average time that a request takes."""


class OverBudget(Exception):
    """A request that a tenant may not make now."""

    def __init__(self, what: Exceeded, limit: int, wait_s: float) -> None:
        super().__init__(what)
        self.what: Exceeded = what
        self.limit = limit
        self.retry_after_s = max(math.ceil(wait_s), 1)


class Account:
    """Account of one tenant. It outlives changes of the tenant's limits."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.running = 0
        """Requests that wait at the gateway or are at a replica."""
        self._duration_s = 0.0
        self._limits = limits
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.limit(limits, now)

    @property
    def limits(self) -> Limits:
        """What the tenant may do."""
        return self._limits

    def limit(self, limits: Limits, now: float) -> None:
        """What the tenant may do from now on; budgets that it had keep their level."""
        self._limits = limits
        self._requests = _resized(self._requests, limits.requests_per_minute, now)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, now)

    def open(self, tokens: int, now: float) -> None:
        """One more request of about `tokens`; raises `OverBudget`."""
        limits = self._limits
        if limits.max_concurrent is not None and self.running >= limits.max_concurrent:
            raise OverBudget("max_concurrent", limits.max_concurrent, self._duration_s / self.running)
        if self._requests is not None and limits.requests_per_minute is not None and (wait := self._requests.wait_s(now)):
            raise OverBudget("requests_per_minute", limits.requests_per_minute, wait)
        if self._tokens is not None and limits.tokens_per_minute is not None and (wait := self._tokens.wait_s(now)):
            raise OverBudget("tokens_per_minute", limits.tokens_per_minute, wait)
        self.running += 1
        if self._requests is not None:
            self._requests.take(1, now)
        self.spend(tokens, now)

    def spend(self, tokens: int, now: float) -> None:
        """Charge more tokens than were known; a negative number refunds."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def void(self, tokens: int, now: float) -> None:
        """A request was not served: what `open` took is given back."""
        self.running -= 1
        if self._requests is not None:
            self._requests.take(-1, now)
        self.spend(-tokens, now)

    def close(self, took_s: float) -> None:
        """A request has ended after `took_s` seconds."""
        self.running -= 1
        self._duration_s = REMEMBERED * self._duration_s + (1 - REMEMBERED) * took_s if self._duration_s else took_s


def _resized(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket
