"""How long replicas took for their weights, in the status."""

from typing import Any

import pytest
from operator_world import World

from penstock.operator.loading import KIND, load_times_key
from penstock.operator.observed import LoadTimes
from penstock.operator.store import Key


@pytest.fixture
def world(api: Any, make: Any) -> World:
    return World(api, make)


def told(world: World) -> dict[str, Any]:
    (pool,) = world.live("InferenceModel")["status"]["pools"]
    return {name: value for name, value in pool.items() if name.startswith("load")}


async def serving(world: World, key: Key, address: str = "10.0.0.1", name: str = "a") -> None:
    await world.apply(world.make.resource(replicas=1))
    await world.settle(key)
    revision = world.live("Deployment")["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"]
    pod = world.make.ready_pod(name, revision=revision)
    pod["status"]["podIP"] = address
    world.api.put(pod)


@pytest.mark.req("LD-12", "XC-03")
async def test_the_status_sets_the_load_beside_the_floor_of_the_storage(world: World, key: Key) -> None:
    world.replicas.loads["http://10.0.0.1:8000"] = LoadTimes(40.0, 12.5)
    await serving(world, key)
    await world.settle(key)
    assert (load_times_key(key), 0.0) in world.looks, "asked beside the reconciles"
    assert told(world) == {}
    await world.reconciler.reconcile(load_times_key(key))
    assert (key, 0.0) in world.looks
    await world.settle(key)
    assert told(world) == {"loadMilliseconds": 40_000, "loadFloorMilliseconds": 12_500}


async def test_one_replica_of_a_revision_is_asked_once(world: World, key: Key) -> None:
    await serving(world, key)
    await serving(world, key, "10.0.0.2", "b")
    for _ in range(3):
        await world.reconciler.reconcile(load_times_key(key))
        await world.settle(key)
    assert len(world.replicas.asked) == 1
    world.looks.clear()
    await world.settle(key)
    assert not [it for it, _ in world.looks if it.kind == KIND]


async def test_a_replica_that_does_not_say_leaves_the_status_without(world: World, key: Key) -> None:
    world.replicas.down.add("http://10.0.0.1:8000")
    await serving(world, key)
    await world.reconciler.reconcile(load_times_key(key))
    await world.settle(key)
    assert told(world) == {}
    assert world.replicas.asked == ["http://10.0.0.1:8000"]
