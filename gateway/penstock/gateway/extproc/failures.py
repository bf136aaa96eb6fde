"""The last requests that failed, for people: what `/debug/failures` shows."""

from collections import deque
from itertools import islice

import msgspec

KEPT = 256
MAX_MESSAGE = 1_000
"""Characters of a message that are kept."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was refused here, or that a replica answered with a status of 500 or above."""

    time: float
    """Unix time in seconds."""
    request_id: str
    model: str | None
    """`Model.id`; None: it was refused before the model was known."""
    tenant: str | None
    status: int
    reason: str
    """A word for machines."""
    message: str
    replica: str | None = None
    """The replica that answered. None: the gateway refused the request."""


class FailureLog:
    """The last failures of this process; no prompts in them."""

    def __init__(self) -> None:
        self._failures: deque[Failure] = deque(maxlen=KEPT)

    def add(self, failure: Failure) -> None:
        """Notes one."""
        if len(failure.message) > MAX_MESSAGE:
            failure = msgspec.structs.replace(failure, message=failure.message[:MAX_MESSAGE] + "…")
        self._failures.append(failure)

    def last(self, count: int) -> list[Failure]:
        """The newest `count`, newest first."""
        return list(islice(reversed(self._failures), max(count, 0)))
