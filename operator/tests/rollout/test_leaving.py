"""Pools that the spec names no longer."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from operator_world import World

from penstock.api.resources import MAX_POOLS
from penstock.operator.rollout.leaving import leaving
from penstock.operator.rollout.pace import PATIENCE_S
from penstock.operator.store import Key

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def workload(pool: str, replicas: int, owner: str = "uid-tiny") -> Object:
    owners = [{"uid": owner, "controller": True}]
    head = {"name": f"tiny-{pool}", "labels": {"penstock.dev/pool": pool}, "ownerReferences": owners}
    return {"kind": "Deployment", "metadata": head, "spec": {"replicas": replicas}}


def unschedulable(make: Any, seconds: float, pool: str) -> Object:
    since = (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    words = {"reason": "Unschedulable", "message": "0/2 nodes are available", "lastTransitionTime": since}
    return make.pod("starved", pool=pool, conditions=[{"type": "PodScheduled", "status": "False", **words}])


def stays(make: Any, old: int, new: int, *others: Object, replicas: int = 2, **spec: Any) -> tuple[list[str], str, float | None]:
    """Of a pool `old` with so many ready replicas, where the spec has `new` with so many: what stays, and why."""
    pods = [make.ready_pod(f"{pool}-{nth}", pool=pool) for pool, count in (("old", old), ("new", new)) for nth in range(count)]
    model = make.model(pools=[{"name": "new"}], replicas=replicas, **spec)
    workloads = {f"tiny-{pool}": workload(pool, replicas) for pool in ("old", "new")}
    found = leaving(model, workloads, [*pods, *others], NOW)
    return list(found.pools), found.blocked, found.look_again_s


def test_it_serves_until_the_others_can_take_its_place(make: Any) -> None:
    assert stays(make, 2, 0) == (["old"], "", None)
    assert stays(make, 2, 1) == (["old"], "", None)
    assert stays(make, 2, 2)[0] == []
    assert stays(make, 3, 2)[0] == [], "as many as they want are enough"
    assert stays(make, 0, 0)[0] == [], "it serves nothing"
    assert stays(make, 2, 0, replicas=0)[0] == [], "nothing is meant to run"
    assert stays(make, 2, 0, rollout={"allowDowntime": True})[0] == []


def test_what_is_somebody_elses_is_left_out(make: Any) -> None:
    pods = [make.ready_pod("other-0", pool="other")]
    found = leaving(make.model(pools=[{"name": "new"}]), {"tiny-other": workload("other", 1, "another's")}, pods, NOW)
    assert found.pools == {}


def test_where_there_is_no_room_it_makes_some_but_not_with_the_last_replica(make: Any) -> None:
    assert stays(make, 2, 1, unschedulable(make, PATIENCE_S - 5, "new")) == (["old"], "", 5)
    assert stays(make, 2, 1, unschedulable(make, PATIENCE_S + 1, "new"))[0] == []
    names, blocked, _ = stays(make, 2, 0, unschedulable(make, PATIENCE_S + 1, "new"))
    assert names == ["old"]
    assert "pool new" in blocked and "0/2 nodes are available" in blocked and "allowDowntime" in blocked


@pytest.fixture
def world(api: Any, make: Any) -> World:
    return World(api, make)


async def test_a_renamed_pool_goes_with_all_that_is_its_own_when_the_new_one_serves(world: World, key: Key) -> None:
    make, own = world.make, ("Deployment", "Service", "NetworkPolicy")
    await world.apply(make.resource(pools=[{"name": "old"}], replicas=1))
    await world.settle(key)

    def serve(pool: str) -> None:
        revision = world.live("Deployment", f"tiny-{pool}")["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"]
        world.api.put(make.ready_pod(f"{pool}-0", pool=pool, revision=revision))

    serve("old")
    await world.settle(key)
    assert world.condition("Ready")[0] == "True"
    old = world.live("Deployment", "tiny-old")  # what it is renamed for says nothing of the new one
    gave_up = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    world.api.put({**old, "status": {"observedGeneration": old["metadata"]["generation"], "conditions": [gave_up]}})
    await world.apply(make.resource(pools=[{"name": "new"}], replicas=1, generation=2))
    await world.settle(key)
    for pool in ("old", "new"):
        assert all((kind, "default", f"tiny-{pool}") in world.api.objects for kind in own)
    assert world.condition("Ready")[:2] == ("Unknown", "RollingOut")
    assert world.condition("Serving")[0] == "True"
    status = world.live("InferenceModel")["status"]
    assert [(it["name"], it["ready"], it["updated"]) for it in status["pools"]] == [("new", "0/1", 0), ("old", "1/0", 0)]
    serve("new")
    await world.settle(key)
    del world.api.objects["Pod", "default", "old-0"]
    assert not [it for it in world.api.objects if it[0] in ("Deployment", "Service") and it[2] == "tiny-old"]
    assert world.live("Deployment", "tiny-new")


async def test_the_status_has_room_for_as_many_pools_as_a_spec(world: World, key: Key) -> None:
    names = [f"p{nth}" for nth in range(MAX_POOLS)]
    await world.apply(world.make.resource(pools=[{"name": name} for name in names]))
    await world.settle(key)
    revision = world.live("Deployment", "tiny-p0")["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"]
    world.api.put(world.make.ready_pod("p0-0", pool="p0", revision=revision))
    await world.apply(world.make.resource(pools=[{"name": name} for name in ["new", *names[1:]]], generation=2))
    await world.settle(key)
    status = world.live("InferenceModel")["status"]
    assert [it["name"] for it in status["pools"]] == ["new", *names[1:]], "p0 stays, unsaid"
    assert ("Deployment", "default", "tiny-p0") in world.api.objects
