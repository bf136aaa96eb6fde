"""Failures that only Events report: a LeaderWorkerSet without pods (its StatefulSets have no condition for that), and containers
that
cannot be created, such as for a volume that cannot be mounted."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from penstock.api import labels
from penstock.operator.objects import Condition, ContainerStatus, Object, Pod, PodStatus, Workload, WorkloadStatus
from penstock.operator.pods import being_made, is_ready, of_pool

EVENTS_AGAIN_S: Final = 5.0
"""Between looks at a namespace's StatefulSets while a group does not serve: no watch tells of Events."""
CREATED: Final = ("FailedCreate", "SuccessfulCreate")
"""Reasons of Events: the later of them counts."""
FRESH_S: Final = 1200.0
"""The StatefulSet controller tries again after 1,000 s at the latest: an older Event is about something that is over."""

MAKING_S: Final = 30.0
"""Seconds after which the Events of a pod with a container still being created are read, and between two such reads."""


def incomplete(workload: Workload, pods: Sequence[Pod]) -> bool:
    """Whether fewer groups of a LeaderWorkerSet serve than it wants."""
    pool = workload["metadata"]["labels"].get(labels.POOL, "")
    leaders = sum(map(is_ready, of_pool(pods, pool)))
    return leaders < workload["spec"].get("replicas", 1)


def with_failure(workload: Workload, events: Sequence[Object], now: datetime) -> Workload:
    """Add a Deployment's condition to a LeaderWorkerSet whose StatefulSets cannot create pods.

    Args:
        workload: The LeaderWorkerSet.
        events: Events of the namespace's StatefulSets.
        now: The time.
    """
    sets = re.compile(rf"{re.escape(workload['metadata']['name'])}(-\d+)?")  # the leaders', and each group's workers'
    last: dict[str, Object] = {}
    for it in sorted(events, key=_last):
        name = it["involvedObject"].get("name", "")  # Events are anybody's to write, and say what their writers please
        if it.get("reason") in CREATED and sets.fullmatch(name):
            last[name] = it
    told = [it for it in last.values() if it["reason"] == "FailedCreate" and (now - _last(it)).total_seconds() < FRESH_S]
    if not told:
        return workload
    newest = max(told, key=_last)
    since = min(datetime.fromisoformat(newest.get("firstTimestamp") or newest["metadata"]["creationTimestamp"]), _last(newest))
    failure: Condition = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": newest.get("message", ""),
        "lastTransitionTime": since.astimezone(UTC).isoformat(),
    }
    status: WorkloadStatus = workload.get("status", {})
    generation = workload["metadata"].get("generation", 0)
    conditions = [*status.get("conditions", []), failure]
    return {**workload, "status": {**status, "observedGeneration": generation, "conditions": conditions}}


def stuck(pod: Pod, now: datetime) -> bool:
    """Whether a pod's containers have not been made for long, and it does not say why."""
    since = _scheduled(pod)
    return since is not None and being_made(pod) and (now - since).total_seconds() >= MAKING_S


def with_reason(pod: Pod, events: Sequence[Object], now: datetime) -> Pod:
    """Add the reason from its Events to a stuck pod whose containers wait.

    Args:
        pod: The pod.
        events: Events about the pod.
        now: The time.
    """
    since = _scheduled(pod)
    newest = max((it for it in events if since is not None and _last(it) >= since), key=_last, default=None)
    # After a Warning that is over something else follows, such as the image that is pulled.
    if newest is None or newest.get("type") != "Warning" or not newest.get("reason"):
        return pod
    if (now - _last(newest)).total_seconds() >= FRESH_S:
        return pod
    waiting = {"reason": newest["reason"], "message": newest.get("message", newest["reason"])}
    status: PodStatus = pod.get("status", {})
    states: list[ContainerStatus] = [{**it, "state": {"waiting": waiting}} for it in status.get("containerStatuses", [])]
    return {**pod, "status": {**status, "containerStatuses": states}}


def _scheduled(pod: Pod) -> datetime | None:
    conditions = pod.get("status", {}).get("conditions", [])
    found = (it for it in conditions if it["type"] == "PodScheduled" and it["status"] == "True")
    return next((datetime.fromisoformat(since) for it in found if (since := it.get("lastTransitionTime"))), None)


def _last(event: Object) -> datetime:
    """When it was last seen."""
    series: Object = event.get("series") or {}
    told = event.get("lastTimestamp") or series.get("lastObservedTime") or event.get("eventTime")
    return datetime.fromisoformat(told or event["metadata"]["creationTimestamp"])
