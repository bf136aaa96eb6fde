"""How long pods have been there, by our own steady clock: the API server's is another one, and either may be set anew."""

import time
from collections.abc import Callable, Iterable, Mapping, Set
from datetime import UTC, datetime
from math import inf
from typing import Any

Object = dict[str, Any]


class Ages:
    """Of the pods of all pools.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: dict[str, tuple[float, Mapping[str, float]]] = {}
        """By pool: when its pods were last looked at, and when each of them began, by UID."""

    def of(self, pool: str, pods: Iterable[Object]) -> dict[str, float]:
        """The age of each of a pool's pods in seconds, by UID. What their creation times say counts at the first look at a pool;
        from then on nothing is older than the time since the look before it appeared."""
        now = self._clock()
        before, known = self._looks.get(pool, (-inf, dict[str, float]()))
        uids = {pod["metadata"]["uid"]: pod for pod in pods}
        began = {uid: known[uid] if uid in known else now - min(age_s(pod), now - before) for uid, pod in uids.items()}
        self._looks[pool] = now, began
        return {uid: now - since for uid, since in began.items()}

    def keep(self, pools: Set[str]) -> None:
        """Forgets all other pools."""
        self._looks = {pool: look for pool, look in self._looks.items() if pool in pools}


def age_s(pod: Object) -> float:
    """Since its creation, as far as this machine's clock can tell: never less than nothing."""
    return max((datetime.now(UTC) - datetime.fromisoformat(pod["metadata"]["creationTimestamp"])).total_seconds(), 0.0)
