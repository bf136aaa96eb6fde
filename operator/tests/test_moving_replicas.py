"""A single replica whose node is drained: another one starts first (`rollout.surgeBeforeEvict`)."""

from typing import Any

import pytest
from kubernetes.aio.client import ApiClient
from operator_world import World

from penstock.kube.cache import Cache, Change
from penstock.operator.api import NODES
from penstock.operator.nodes import Nodes, trimmed_node
from penstock.operator.store import Children, Key

SURGE = {"surgeBeforeEvict": True}


@pytest.fixture
def world(api: Any, make: Any) -> World:
    return World(api, make)


def on(pod: Any, node: str) -> Any:
    return {**pod, "spec": {**pod.get("spec", {}), "nodeName": node}}


def budget(world: World) -> Any:
    return world.api.objects.get(("PodDisruptionBudget", "default", "tiny-main"), {}).get("spec")


async def test_another_replica_starts_before_the_only_one_may_be_evicted(world: World, key: Key) -> None:
    world.going = frozenset()
    await world.apply(world.make.resource(replicas=1, rollout=SURGE))
    await world.settle(key)
    assert budget(world)["minAvailable"] == 1
    revision = world.live("Deployment")["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"]
    old = on(world.make.ready_pod("old", revision=revision), "a")
    world.api.put(old)
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 1
    world.going = frozenset({"a"})
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 2
    assert world.condition("Progressing")[:2] == ("True", "MovingReplica")
    assert world.condition("Ready")[0] == "True", "the old one serves meanwhile"
    world.api.put(on(world.make.ready_pod("new", revision=revision), "b"))
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 2, "until the old one has been evicted"
    await world.api.delete(old)
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 1
    assert world.condition("Progressing")[:2] == ("False", "Complete")


async def test_a_node_that_stays_after_all_costs_nothing(world: World, key: Key) -> None:
    world.going = frozenset({"a"})
    await world.apply(world.make.resource(replicas=1, rollout=SURGE))
    world.api.put(on(world.make.ready_pod("old"), "a"))
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 2
    world.going = frozenset()
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("changes", "going", "expected"),
    [
        ({"replicas": 1, "rollout": SURGE}, None, None),  # nobody would start the other one, and a drain would wait for ever
        ({"replicas": 1}, frozenset(), None),
        ({"replicas": 2, "rollout": SURGE}, frozenset(), {"maxUnavailable": 1}),
        ({"replicas": 0, "rollout": SURGE}, frozenset(), None),
    ],
)
async def test_only_a_single_replica_with_a_successor_blocks_a_drain(
    world: World, key: Key, changes: Any, going: Any, expected: Any
) -> None:
    world.going = going
    await world.apply(world.make.resource(**changes))
    await world.settle(key)
    assert (budget(world) or {}).get("maxUnavailable") == (expected or {}).get("maxUnavailable")
    assert (budget(world) is None) is (expected is None)


def node(name: str, **spec: Any) -> Any:
    return {"metadata": {"name": name, "uid": name, "resourceVersion": "1", "labels": {"a": "b"}}, "spec": spec, "status": {}}


async def test_a_node_goes_when_it_is_cordoned_or_a_node_autoscaler_marks_it() -> None:
    told: list[str] = []
    nodes, cache = Nodes(told.append), Cache(ApiClient(), NODES, trim=trimmed_node)
    nodes.follow(cache)
    assert nodes.going is None, "before the first list"
    cache.synced.set()
    states = [
        node("a", taints=[{"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}]),
        node("a", unschedulable=True),
        node("a", unschedulable=True, taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]),
        node("a", taints=[{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]),
        node("a"),
    ]
    seen: list[bool] = []
    old = None
    for state in map(trimmed_node, states):
        cache._objects["", "a"] = state
        nodes._take(Change(("", "a"), old, state))
        old = state
        seen.append(nodes.going == frozenset({"a"}))
    assert seen == [False, True, True, True, False]
    assert told == ["a", "a"], "when it begins, and when it ends"


def test_the_models_on_a_node_are_known(make: Any) -> None:
    children = Children(lambda key: None)
    for name, place in (("one", "a"), ("two", "b")):
        pod = on(make.ready_pod(name), place)
        pod["metadata"]["labels"]["penstock.dev/model"] = f"model-{name}"
        children.observe("Pod", Change(("default", name), None, pod))
    assert children.on_node("a") == {Key("InferenceModel", "default", "model-one")}
    assert children.on_node("c") == set()
