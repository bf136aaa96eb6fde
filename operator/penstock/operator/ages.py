"""Ages and start times of pods. Ages use our own monotonic clock: the API server's clock is a different one, and wall clocks can
be set."""

import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf

from penstock.operator.objects import Pod
from penstock.operator.pods import is_ready, lost_readiness, ready_condition


@dataclass(frozen=True)
class PodTimes:
    """What one look at a pool's pods tells."""

    ages_s: Mapping[str, float]
    """Seconds since each pod was created, by UID."""
    started_s: tuple[float, ...]
    """Seconds from creation to ready of the pods that have become ready for the first time since the last look."""


@dataclass(frozen=True)
class _Look:
    at: float
    began: Mapping[str, float]
    """When each pod was created, by UID, on our clock."""
    unready: Set[str]
    """UIDs of the pods that have never been ready."""


class Ages:
    """Ages of the pods of all pools.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: dict[str, _Look] = {}
        """The last look at each pool."""

    def of(self, pool: str, pods: Iterable[Pod]) -> PodTimes:
        """The ages of a pool's pods, and the starts since the last look.

        Creation times count at the first look at a pool; from then on nothing is older than the time since the look before it
        appeared. A pod that is ready at that first look teaches nothing, since only its latest readiness is known; nor does one
        that lost its readiness and has it again.
        """
        now, before = self._clock(), self._looks.get(pool)
        known, looked_at = (before.began, before.at) if before is not None else ({}, -inf)
        began, unready, first = dict[str, float](), set[str](), list[Pod]()
        for pod in pods:
            uid = pod["metadata"]["uid"]
            began[uid] = known[uid] if uid in known else now - min(age_s(pod), now - looked_at)
            if before is not None and uid in known and uid not in before.unready:
                continue
            if not is_ready(pod):
                unready |= set() if lost_readiness(pod) else {uid}
            elif before is not None:
                first.append(pod)
        self._looks[pool] = _Look(now, began, unready)
        ages = {uid: now - since for uid, since in began.items()}
        return PodTimes(ages, tuple(took for pod in first if (took := _start_s(pod)) is not None))

    def keep(self, pools: Set[str]) -> None:
        """Forgets all other pools."""
        self._looks = {pool: look for pool, look in self._looks.items() if pool in pools}


def age_s(pod: Pod) -> float:
    """Since its creation, as far as this machine's clock can tell: never less than nothing."""
    return max((datetime.now(UTC) - _time(pod["metadata"]["creationTimestamp"])).total_seconds(), 0.0)


def _start_s(pod: Pod) -> float | None:
    """Return the seconds from a ready pod's creation to its readiness, or None if its condition has no time."""
    since = (ready_condition(pod) or {}).get("lastTransitionTime")
    return None if since is None else max((_time(since) - _time(pod["metadata"]["creationTimestamp"])).total_seconds(), 0.0)


def _time(stamp: str) -> datetime:
    return datetime.fromisoformat(stamp)
