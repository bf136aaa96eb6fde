"""How fast a rollout may go."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.operator.desired import Pace, deployment, pod_template
from penstock.operator.desired.leader_worker_set import leader_worker_set
from penstock.operator.rollout.pace import PATIENCE_S, Step, step

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
WORDS = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu"


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def starved(make: Any, seconds: float) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": WORDS}
    return make.pod("new", revision="r2", conditions=[{**condition, "lastTransitionTime": ago(seconds)}])


def workload(surge: int = 1, quota_since: float | None = None) -> Object:
    strategy = {"rollingUpdate": {"maxSurge": surge}}
    found: Object = {"kind": "Deployment", "metadata": {}, "spec": {"strategy": strategy}, "status": {}}
    if quota_since is not None:
        failed = {"type": "ReplicaFailure", "status": "True", "lastTransitionTime": ago(quota_since)}
        found["status"]["conditions"] = [{**failed, "message": "pods is forbidden: exceeded quota: gpus"}]
    return found


def groups(**limits: Any) -> Object:
    return {"kind": "LeaderWorkerSet", "metadata": {}, "spec": {"rolloutStrategy": {"rollingUpdateConfiguration": limits}}}


def taken(
    pods: list[Object], live: Object | None = None, wanted: int = 2, allow_downtime: bool = False, paused: bool = False
) -> Step:
    return step(live or workload(), pods, "r2", wanted=wanted, allow_downtime=allow_downtime, paused=paused, now=NOW)


def test_where_there_is_room_or_nothing_to_replace_it_surges(make: Any) -> None:
    old, new = make.ready_pod("old", revision="r1"), make.pod("new", revision="r2")
    assert taken([old, new]) == Step()
    assert taken([starved(make, 999)]) == Step(), "too small a cluster is no matter of the rollout"
    assert step(None, [], "r2", wanted=1, allow_downtime=False, paused=False, now=NOW) == Step()


def test_a_new_replica_without_a_node_is_given_time_and_then_one_old_makes_room(make: Any) -> None:
    old = make.ready_pod("old", revision="r1")
    early = taken([old, starved(make, PATIENCE_S - 5)])
    assert (early.pace, early.settling, early.look_again_s, early.blocked) == ("Surge", True, 5, "")
    late = taken([old, starved(make, PATIENCE_S)])
    assert (late.pace, late.settling, late.blocked) == ("Replace", True, "")


def test_the_pace_stays_for_as_long_as_the_rollout_lasts(make: Any) -> None:
    old, new = make.ready_pod("old", revision="r1"), make.pod("new", revision="r2")
    assert taken([old, new], workload(surge=0)).pace == "Replace"
    assert taken([new], workload(surge=0)).pace == "Surge"


@pytest.mark.parametrize("quota", [False, True])
def test_the_only_replica_stays_and_what_is_missing_is_said(make: Any, quota: bool) -> None:
    old = make.ready_pod("old", revision="r1")
    pods, live = ([old], workload(quota_since=60)) if quota else ([old, starved(make, 60)], workload())
    blocked = taken(pods, live, wanted=1)
    assert blocked.pace == "Surge"
    assert ("exceeded quota: gpus" if quota else WORDS) in blocked.blocked
    assert "allowDowntime" in blocked.blocked
    assert taken(pods, live, wanted=1, allow_downtime=True).pace == "Replace"
    assert taken(pods, live, wanted=2).pace == "Replace"


def test_what_waits_for_a_replica_that_drains_is_not_blocked(make: Any) -> None:
    going = make.ready_pod("old", revision="r1")
    going["metadata"]["deletionTimestamp"] = ago(1)
    other = make.ready_pod("other", revision="r1")
    assert taken([going, other, starved(make, 600)], wanted=1) == Step(settling=True)


def test_the_only_group_cannot_be_replaced_without_downtime(make: Any) -> None:
    old, young = make.ready_pod("old", revision="r1"), make.pod("old", revision="r1")
    surging = groups(maxUnavailable="1%", maxSurge=1)
    blocked = taken([old], surging, wanted=1)
    assert blocked.pace == "Surge"
    assert "allowDowntime" in blocked.blocked
    assert taken([old], surging, wanted=1, paused=True).blocked == ""
    assert taken([old], surging, wanted=1, allow_downtime=True).pace == "Replace"
    assert taken([young], surging, wanted=1).pace == "Replace", "it serves nobody"
    assert taken([old], surging, wanted=2) == Step()


@pytest.mark.parametrize(
    ("rollout", "surging", "replacing"),
    [
        ({}, (1, 0), (0, 1)),
        ({"maxSurge": "25%"}, ("25%", 0), (0, 1)),
        ({"maxSurge": 8, "maxUnavailable": "10%"}, (8, "10%"), (0, "10%")),
        ({"maxSurge": 0, "maxUnavailable": 3}, (0, 3), (0, 3)),
    ],
)
def test_as_many_replicas_are_replaced_at_a_time_as_the_spec_says(
    make: Any, rollout: Object, surging: tuple[Any, Any], replacing: tuple[Any, Any]
) -> None:
    model = make.model(rollout=rollout)
    paces: list[tuple[Pace, tuple[Any, Any]]] = [("Surge", surging), ("Replace", replacing)]
    for pace, (surge, unavailable) in paces:
        (pool,) = model.spec.pools
        template = pod_template(model, pool, make.rendering)
        found = deployment(model, pool, template, pace)["spec"]["strategy"]["rollingUpdate"]
        assert found == {"maxSurge": surge, "maxUnavailable": unavailable}
        group = leader_worker_set(model, pool, template, pace)["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert group == {"maxSurge": surge, "maxUnavailable": unavailable or "1%"}


def test_a_pause_is_no_pace(make: Any) -> None:
    old = make.ready_pod("old", revision="r1")
    assert taken([old], groups(maxUnavailable=1, maxSurge=0, partition=1000)).pace == "Surge"
    assert taken([old], groups(maxUnavailable=1, maxSurge=0, partition=0)).pace == "Replace"
