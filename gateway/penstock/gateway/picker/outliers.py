"""Outlier detection: replicas are ejected by what was seen of them, and come back on probation.

An ejected replica is a last resort, never excluded: where all are ejected the best of them is tried. After its ejection it is on
probation: it may have one request without response headers, then two, four … with each that it answers, so that a replica that
was stopped and goes on (SIGCONT) meets no herd. One that fails on probation is ejected for twice as long.
"""

from collections import deque
from math import inf
from typing import NamedTuple

from penstock.gateway.picker.candidates import ReplicaKey

BASE_S = 2.0
"""First ejection."""
MAX_S = 60.0
"""Longest ejection."""
FORGET_S = 60.0
"""Time after an ejection without another, after which the next ejection is a first one again."""
WINDOW_S = 10.0
"""How long an error of an answer counts."""
ERRORS = 5
"""Errors within the window that eject, if at least half of the answers in it are errors."""
RECOVERED = 8
"""Allowance at which probation ends."""
HISTORY = 64
"""Answers remembered of a replica: where it gives more within the window, the newest."""


class Standing(NamedTuple):
    """How far a replica is trusted with requests."""

    ejected_until: float
    allowance: float
    """Requests that it may have without response headers; inf off probation."""


UNTROUBLED = Standing(-inf, inf)


class _Record:
    """What was seen of one replica that has failed lately."""

    __slots__ = ("allowance", "answers", "ejections", "unreachable", "until")

    def __init__(self, now: float) -> None:
        self.answers: deque[tuple[float, bool]] = deque(maxlen=HISTORY)
        """(when, whether it was an error)."""
        self.until = now
        self.ejections = 0
        """Ejections in a row."""
        self.unreachable = False
        """The cause of the last ejection, which a sign of life ends."""
        self.allowance = inf


class Outliers:
    """The records of all replicas; those that never failed have none. Time is an argument (monotonic seconds)."""

    def __init__(self) -> None:
        self.records: dict[ReplicaKey, _Record] = {}
        """What was seen of those that have failed; while there is none, all replicas are untroubled."""
        self.ejections = 0
        """How many there were."""

    def unreachable(self, key: ReplicaKey, now: float) -> bool:
        """A connection failed, or no answer came: ejects at once. Says whether it was not ejected yet."""
        record = self.records.setdefault(key, _Record(now))
        return self._eject(record, now, unreachable=True)

    def error(self, key: ReplicaKey, now: float) -> bool:
        """Record an error of the replica's own (5xx). Return whether that ejects it."""
        record = self.records.setdefault(key, _Record(now))
        record.answers.append((now, True))
        recent = [error for at, error in record.answers if now - at <= WINDOW_S]
        if record.allowance < inf or (sum(recent) >= ERRORS and 2 * sum(recent) >= len(recent)):
            return self._eject(record, now, unreachable=False)
        return False

    def heard(self, key: ReplicaKey, now: float) -> None:
        """A sign of life, such as a load report: it can be reached."""
        record = self.records.get(key)
        if record is not None and record.unreachable:
            record.until = min(record.until, now)

    def answered(self, key: ReplicaKey, now: float) -> None:
        """Record an answer, which earns trust."""
        record = self.records.get(key)
        if record is None:
            return
        self.heard(key, now)
        record.answers.append((now, False))
        if record.allowance < inf and now >= record.until:  # else it was asked before it was ejected
            record.allowance *= 2
            if record.allowance >= RECOVERED:
                record.allowance = inf
        if record.allowance == inf and now - record.until >= FORGET_S:
            del self.records[key]

    def refused(self, key: ReplicaKey, now: float) -> None:
        """Record a refusal before any work was done (the replica is full or draining). This makes no outlier."""
        record = self.records.setdefault(key, _Record(now))
        record.until = max(record.until, now + BASE_S)

    def standing(self, key: ReplicaKey) -> Standing:
        """How far `key` is trusted."""
        record = self.records.get(key)
        return UNTROUBLED if record is None else Standing(record.until, record.allowance)

    def drop(self, key: ReplicaKey) -> None:
        """Forgets a replica that is gone or has restarted."""
        self.records.pop(key, None)

    def _eject(self, record: _Record, now: float, *, unreachable: bool) -> bool:
        if now < record.until:  # one cause is seen many times: each request that was under way fails
            return False
        record.ejections = record.ejections + 1 if now - record.until < FORGET_S else 1
        record.until = now + min(BASE_S * 2 ** (record.ejections - 1), MAX_S)
        record.allowance, record.unreachable = 1, unreachable
        self.ejections += 1
        return True
