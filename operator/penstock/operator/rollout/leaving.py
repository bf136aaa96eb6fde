"""Pools that the spec names no longer, such as one that was renamed: they serve until the others can take their place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.api import labels
from penstock.api.resources import InferenceModel
from penstock.operator.apply import owned
from penstock.operator.desired import child_name, size
from penstock.operator.objects import Pod, Workload
from penstock.operator.pods import is_ready
from penstock.operator.rollout.pace import PATIENCE_S, no_room

KINDS: Final = ("Deployment", "LeaderWorkerSet", "Service", "PodDisruptionBudget", "NetworkPolicy")
"""What is there for each pool."""


@dataclass(frozen=True)
class Leaving:
    """Workloads of one model that leave."""

    pools: Mapping[str, Workload]
    """Workloads that stay for now, by pool."""
    blocked: str = ""
    """Why they cannot go, and what would let them."""
    look_again_s: float | None = None

    @property
    def kept(self) -> frozenset[tuple[str, str]]:
        """Kind and name of the children that stay."""
        return frozenset((kind, it["metadata"]["name"]) for it in self.pools.values() for kind in KINDS)


def leaving(model: InferenceModel, workloads: Mapping[str, Workload], pods: Sequence[Pod], now: datetime) -> Leaving:
    """Return the pools that stay although the spec no longer names them: all of them until each pool of the spec has a serving
    replica,
    and those together have as many as leave, or as they want, or as there is room for.

    Args:
        workloads: The model's workloads by name.
        pods: The model's pods.
        now: The time.
    """
    names = {pool.name for pool in model.spec.pools}
    own = [it for it in workloads.values() if owned(it, model.metadata.uid)]
    old = {pool: it for it in own if (pool := it["metadata"]["labels"].get(labels.POOL, "")) not in names}
    ready = [pod["metadata"]["labels"].get(labels.POOL) for pod in pods if is_ready(pod)]
    serving = sum(pool in old for pool in ready)
    if not serving or model.spec.rollout.allow_downtime:
        return Leaving({})
    live = {pool.name: workloads.get(child_name(model.metadata.name, pool.name)) for pool in model.spec.pools}
    wanted = {pool.name: _wanted(live[pool.name], size(model, pool).initial) for pool in model.spec.pools}
    missing = [pool for pool, count in wanted.items() if count and pool not in ready]
    short = sum(min(ready.count(pool), count) for pool, count in wanted.items()) < min(serving, sum(wanted.values()))
    if not missing and not short:
        return Leaving({})
    new = [pod for pod in pods if pod["metadata"]["labels"].get(labels.POOL) in names]
    starved = next(filter(None, (no_room(it, new) for it in live.values() if it is not None)), None)
    if starved is None:
        return Leaving(old)
    since, words = starved
    left = PATIENCE_S - (now - since).total_seconds()
    if left > 0:
        return Leaving(old, look_again_s=left)
    if not missing:
        return Leaving({})  # they make room
    return Leaving(
        old,
        f"it serves, though the spec names it no longer, until pool {', '.join(missing)} does, which finds no room ({words}): "
        "make room for one more, or set spec.rollout.allowDowntime",
    )


def _wanted(live: Workload | None, initial: int) -> int:
    return initial if live is None else live["spec"].get("replicas", 1)
