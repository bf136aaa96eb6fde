"""How a rollout may go on: with more replicas where there is room for them, else with fewer, and where neither can be, a word.

Whether there is room is asked of those who know: the scheduler (a new replica is there and finds no node) and the quota (it
cannot be made). So it holds for devices, memory, taints and claims alike, and the operator need not read nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.operator.desired import Pace
from penstock.operator.objects import Condition, Pod, Workload
from penstock.operator.pods import is_live, is_ready, revision

PATIENCE_S: Final = 20.0
"""Seconds that a new replica waits for a node before an old one makes room, since another pod may be about to end."""


@dataclass(frozen=True)
class Step:
    """What a pool's rollout may do next."""

    pace: Pace = "Surge"
    blocked: str = ""
    """Why it cannot go on, and what would let it."""
    settling: bool = False
    """A new replica without a node is no trouble yet: room is being made, or may appear."""
    look_again_s: float | None = None
    """When to look again though nothing happened."""


def step(
    workload: Workload | None,
    pods: Sequence[Pod],
    target: str,
    *,
    wanted: int,
    allow_downtime: bool,
    paused: bool,
    now: datetime,
) -> Step:
    """Return the next step of one pool.

    Args:
        workload: The live workload.
        pods: Its pods.
        target: The revision that is wanted.
        wanted: The number of replicas.
        allow_downtime: The only replica may stop before its successor is ready.
        paused: Replace no replicas.
    """
    if workload is None or not any(is_live(pod) and revision(pod) != target for pod in pods):
        return Step()
    if workload["kind"] == "LeaderWorkerSet" and wanted == 1 and not paused:
        return _only_group(pods, allow_downtime)
    now_pace = pace_of(workload)
    starved = no_room(workload, [pod for pod in pods if revision(pod) == target])
    if starved is None:
        return Step(now_pace)
    since, words = starved
    if any("deletionTimestamp" in pod["metadata"] for pod in pods):
        return Step(now_pace, settling=True)  # its devices are free when it is gone
    if now_pace == "Replace":
        return Step(now_pace)  # the room that was made for it is somebody else's now
    left = PATIENCE_S - (now - since).total_seconds()
    if left > 0:
        return Step(now_pace, settling=True, look_again_s=left)
    if wanted > 1 or allow_downtime:
        return Step("Replace", settling=True)
    return Step(
        blocked=f"a new replica finds no room ({words}), and the only one may not stop before it: "
        "make room for one more, or set spec.rollout.allowDowntime"
    )


def _only_group(pods: Sequence[Pod], allow_downtime: bool) -> Step:
    """LWS starts no second group before it stops the only one, whatever the surge: with one it waits for ever."""
    if allow_downtime or not any(is_ready(pod) for pod in pods):
        return Step("Replace", settling=True)
    return Step(
        blocked="LeaderWorkerSets stop the only group of a pool before they start its successor: "
        "have one more, or set spec.rollout.allowDowntime"
    )


def pace_of(workload: Workload) -> Pace:
    """How a workload rolls out now."""
    spec = workload["spec"]
    limits = spec.get("strategy", {}).get("rollingUpdate") or spec.get("rolloutStrategy", {}).get(
        "rollingUpdateConfiguration", {}
    )
    # One with a partition is paused, and says nothing of the pace that was.
    return "Replace" if limits.get("maxSurge") == 0 and not limits.get("partition") else "Surge"


def no_room(workload: Workload, pods: Sequence[Pod]) -> tuple[datetime, str] | None:
    """Since when one of these pods has no node, or a quota keeps the workload from making one, and who says so in what words."""
    return next(filter(None, map(_unschedulable, pods)), None) or _over_quota(workload)


def _unschedulable(pod: Pod) -> tuple[datetime, str] | None:
    """Since when a pod has no node, and the scheduler's words."""
    if not is_live(pod):
        return None
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False" and condition.get("reason") == "Unschedulable":
            return _since(condition, pod["metadata"]["creationTimestamp"]), condition.get("message", "Unschedulable")
    return None


def _over_quota(workload: Workload) -> tuple[datetime, str] | None:
    """Since when a quota keeps a new pod from being made, and the API server's words."""
    for condition in workload.get("status", {}).get("conditions", []):
        failed = condition["type"] == "ReplicaFailure" and condition["status"] == "True"
        if failed and "exceeded quota" in condition.get("message", ""):
            return _since(condition, workload["metadata"].get("creationTimestamp", "")), condition["message"]
    return None


def _since(condition: Condition, otherwise: str) -> datetime:
    return datetime.fromisoformat(condition.get("lastTransitionTime") or otherwise)
