"""HorizontalPodAutoscalers beside ours: who sizes what is told, and nobody is fought."""

from typing import Any

import pytest
from operator_world import World, gone, there

from penstock.kube.cache import Change
from penstock.operator.other_scalers import OtherScalers, Target, trimmed_autoscaler
from penstock.operator.store import Key

SCALED = [{"name": "main", "scaling": {"min": 2, "max": 6}}]
DRY = [{"name": "main", "scaling": {"mode": "DryRun", "min": 2, "max": 6}}]
POOL = ("Deployment", "tiny-main")
MODEL = ("InferenceModel", "tiny")
GROUPS = {"Deployment": "apps/v1", "InferenceModel": "penstock.dev/v1alpha1"}


def autoscaler(name: str, kind: str, target: str, replicas: int = 1, version: str = "") -> dict[str, Any]:
    """A HorizontalPodAutoscaler as the API server gives it."""
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "7", "managedFields": [{}]}
    reference = {"apiVersion": version or GROUPS[kind], "kind": kind, "name": target}
    spec = {"scaleTargetRef": reference, "minReplicas": 1, "maxReplicas": 3}
    return {"metadata": meta, "spec": spec, "status": {"desiredReplicas": replicas}}


@pytest.fixture
def world(new_world: Any) -> World:
    return new_world()


def test_who_sizes_what_is_known_and_only_that_is_news() -> None:
    told: list[str] = []
    others = OtherScalers(told.append)
    first, second = autoscaler("a", *POOL), autoscaler("keda-hpa-b", *POOL)
    others.seen(there(first))
    others.seen(there(second))
    assert others.of(Target("default", *POOL)) == "a, keda-hpa-b"
    assert not others.of(Target("elsewhere", *POOL))
    assert not others.of(Target("default", *MODEL))
    assert told == ["default", "default"]
    others.seen(Change(("default", "a"), first, autoscaler("a", *POOL, replicas=3)))
    assert len(told) == 2, "it has only written its status"
    others.seen(Change(("default", "a"), first, autoscaler("a", *MODEL)))
    assert (others.of(Target("default", *POOL)), others.of(Target("default", *MODEL))) == ("keda-hpa-b", "a")
    others.seen(gone(second))
    assert not others.of(Target("default", *POOL))
    assert len(told) == 4


def test_another_groups_kind_of_the_same_name_is_something_else() -> None:
    others = OtherScalers(lambda namespace: None)
    for number, version in enumerate(("apps.openshift.io/v1", "example.com/v1", "v1")):
        others.seen(there(autoscaler(f"theirs-{number}", *POOL, version=version)))
    assert not others.of(Target("default", *POOL))
    others.seen(there(autoscaler("older", *POOL, version="apps/v1beta2")))
    assert others.of(Target("default", *POOL)) == "older", "the version of the group is no matter"
    unnamed = autoscaler("unnamed", *MODEL)
    del unnamed["spec"]["scaleTargetRef"]["apiVersion"]
    others.seen(there(unnamed))
    assert not others.of(Target("default", *MODEL))


def test_of_anybodys_autoscaler_only_its_target_is_kept() -> None:
    kept = trimmed_autoscaler(autoscaler("a", *POOL))
    assert kept["spec"] == {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "tiny-main"}}
    assert set(kept) == {"metadata", "spec"}
    assert "managedFields" not in kept["metadata"]


@pytest.mark.parametrize(
    ("spec", "target", "reason", "words"),
    [
        ({}, POOL, "OtherAutoscaler", "HorizontalPodAutoscaler theirs sizes Deployment tiny-main"),
        ({"pools": DRY}, POOL, "NoReport", "pool main"),
        ({"pools": SCALED}, POOL, "AutoscalerConflict", "remove the one or the other"),
        ({"replicas": 2}, POOL, "AutoscalerConflict", "let it target the InferenceModel instead, or remove spec.replicas"),
        ({"replicas": 2}, MODEL, "OtherAutoscaler", "HorizontalPodAutoscaler theirs sizes the InferenceModel"),
        ({}, MODEL, "AutoscalerConflict", "there is no spec.replicas to change"),
        ({"pools": SCALED}, ("Deployment", "unrelated"), "NoReport", "pool main"),
    ],
)
async def test_who_else_sizes_a_model_is_told_with_what_to_mend(
    world: World, key: Key, spec: dict[str, Any], target: tuple[str, str], reason: str, words: str
) -> None:
    world.others.seen(there(autoscaler("theirs", *target)))
    await world.apply(world.make.resource(**spec))
    await world.settle(key)
    status, said, message = world.condition("ScalingActive")
    assert (status, said) == ("Unknown" if reason == "NoReport" else "False", reason)
    assert words in message
    world.others.seen(gone(autoscaler("theirs", *target)))
    await world.settle(key)
    assert world.condition("ScalingActive")[1] == ("NoReport" if "pools" in spec else "NotConfigured")


async def test_what_another_autoscaler_has_set_stays(world: World, key: Key) -> None:
    world.others.seen(there(autoscaler("theirs", *POOL)))
    await world.apply(world.make.resource())
    await world.settle(key)
    await world.api.apply(
        {"kind": "Deployment", "metadata": {"name": "tiny-main", "namespace": "default"}, "spec": {"replicas": 3}}, "hpa"
    )
    await world.apply(world.make.resource(engine={"dtype": "float32"}))
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 3
    (pool,) = world.live("InferenceModel")["status"]["pools"]
    assert pool["ready"] == "0/3"
