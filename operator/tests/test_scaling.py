"""The autoscaler's hands on Kubernetes."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.operator import scaling
from penstock.operator.acceptance import accept
from penstock.operator.ages import Ages
from penstock.operator.apply import Applier
from penstock.operator.autoscale.bounds import Decision
from penstock.operator.autoscale.learned import Learned, restore
from penstock.operator.autoscale.loop import Record
from penstock.operator.observed import Observed, PoolObserved
from penstock.operator.other_scalers import Target
from penstock.operator.scaling import KubernetesActuator, restored
from penstock.operator.status import status_of
from penstock.operator.store import Children, Key, Resources

ID = "default/tiny/main"
SCALING = {"min": 0, "max": 4, "warm": 1, "scaleToZeroAfter": "10m", "mode": "DryRun"}


@pytest.fixture
def changed() -> list[Key]:
    return []


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def others() -> dict[Target, str]:
    """HorizontalPodAutoscalers by what they size."""
    return {}


@pytest.fixture
def actuator(
    api: Any, make: Any, changed: list[Key], others: dict[Target, str], registry: CollectorRegistry
) -> KubernetesActuator:
    resources, children = Resources(), Children(lambda key: None)
    api.children = children
    resources.put(make.resource(pools=[{"name": "main", "scaling": SCALING}]))
    resources.put(make.resource("fixed"))
    for model in ("tiny", "fixed"):
        meta = {
            "name": f"{model}-main",
            "namespace": "default",
            "labels": {"penstock.dev/model": model, "penstock.dev/pool": "main"},
            "ownerReferences": [{"uid": f"uid-{model}", "controller": True}],
        }
        api.put({"kind": "Deployment", "metadata": meta, "spec": {"replicas": 2}})
    api.put(make.ready_pod("a"))
    api.put(make.ready_pod("b"))
    api.put(make.pod("c"))
    return KubernetesActuator(
        api=api,
        resources=resources,
        observed=children,
        scale=Applier(api, children).scale,
        changed=changed.append,
        others=lambda target: others.get(target, ""),
        registry=registry,
    )


async def test_only_pools_with_scaling_are_offered_with_what_the_spec_says(actuator: KubernetesActuator, api: Any) -> None:
    ready = api.objects["Pod", "default", "a"]
    api.put({**ready, "status": {**ready["status"], "podIP": "fd00::1"}})
    (model,) = await actuator.targets()
    assert (model.id, list(model.pools)) == ("default/tiny", ["main"])
    pool, limits = model.pools["main"], model.limits.pools["main"]
    assert (pool.replicas, pool.dry_run, len(pool.starting)) == (2, True, 1)
    assert pool.endpoints == {"uid-a": "http://[fd00::1]:8000"}
    assert (limits.min_replicas, limits.max_replicas, limits.warm, limits.scale_to_zero_after_s) == (0, 4, 1, 600)


@pytest.mark.req("DR-12")
async def test_a_model_is_read_once_for_each_version(actuator: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def accepting(resource: dict[str, Any]) -> Any:
        read.append(resource["metadata"]["resourceVersion"])
        return accept(resource)

    monkeypatch.setattr(scaling, "accept", accepting)
    for _ in range(3):
        (model,) = await actuator.targets()
    assert (read, model.limits.pools["main"].max_replicas) == (["1"], 4)
    newer = make.resource(pools=[{"name": "main", "scaling": {**SCALING, "max": 9}}])
    newer["metadata"]["resourceVersion"] = "2"
    actuator._resources.put(newer)
    (model,) = await actuator.targets()
    assert (read, model.limits.pools["main"].max_replicas) == (["1", "2"], 9)


async def test_victims_are_cordoned_and_cheapest_and_pardoned_when_the_pool_grows(actuator: Any, api: Any) -> None:
    await actuator.scale(ID, 1, ["uid-b"])
    marks = {name: api.objects["Pod", "default", name]["metadata"].get("annotations", {}) for name in "abc"}
    assert marks["b"]["penstock.dev/cordoned"] == "true"
    assert int(marks["b"]["controller.kubernetes.io/pod-deletion-cost"]) < 0
    assert marks["a"] == marks["c"] == {}
    assert api.objects["Deployment", "default", "tiny-main"]["spec"]["replicas"] == 1
    order = [kind for _, kind, _ in api.calls]
    assert order.index("Pod") < order.index("Deployment"), "nobody may be picked who is about to go"
    await actuator.scale(ID, 3, [])
    assert api.objects["Pod", "default", "b"]["metadata"]["annotations"] == {}


async def test_a_victim_that_need_not_go_gets_requests_again(actuator: Any, api: Any) -> None:
    """Of three the one that does not start goes by itself; a grown load, or a refusal, may keep the size as it was."""
    await actuator.scale(ID, 2, ["uid-b"])

    def cordoned() -> bool:
        return bool(api.objects["Pod", "default", "b"]["metadata"]["annotations"])

    await actuator.spare(ID)
    assert cordoned(), "there are three, and two are to be left: it may still be the one that goes"
    await api.delete(api.objects["Pod", "default", "c"])
    await actuator.spare(ID)
    assert not cordoned()
    calls = len(api.calls)
    await actuator.spare(ID)
    assert len(api.calls) == calls


async def test_a_cordon_that_a_person_has_set_stays_and_its_pod_goes_first_if_chosen(actuator: Any, api: Any) -> None:
    pod = api.objects["Pod", "default", "b"]
    api.put({**pod, "metadata": {**pod["metadata"], "annotations": {"penstock.dev/cordoned": "true"}}})
    await api.delete(api.objects["Pod", "default", "c"])
    api.calls.clear()
    await actuator.spare(ID)
    assert api.calls == []
    await actuator.scale(ID, 1, ["uid-b"])
    assert int(api.objects["Pod", "default", "b"]["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"]) < 0


@pytest.mark.parametrize("cost", ["100", "-1000"])
async def test_a_deletion_cost_that_somebody_else_has_set_makes_no_victim(actuator: Any, api: Any, cost: str) -> None:
    """Such as the pool's template, which all of its pods have it from."""
    for name in "ab":
        pod = api.objects["Pod", "default", name]
        own = {"controller.kubernetes.io/pod-deletion-cost": cost}
        api.put({**pod, "metadata": {**pod["metadata"], "annotations": own}})
    await api.delete(api.objects["Pod", "default", "c"])
    api.calls.clear()
    await actuator.spare(ID)
    assert api.calls == [], "at every look it would be patched anew, for nothing"
    await actuator.scale(ID, 1, ["uid-b"])
    assert [name for _, kind, name in api.calls if kind == "Pod"] == ["b"]
    marks = api.objects["Pod", "default", "b"]["metadata"]["annotations"]
    assert marks == {"penstock.dev/cordoned": "true", "controller.kubernetes.io/pod-deletion-cost": "-1000"}


async def test_a_workload_that_is_not_the_models_is_not_sized_whatever_its_labels(actuator: Any, api: Any) -> None:
    """Such as one that `kubectl delete --cascade=orphan` left behind."""
    mine = api.objects["Deployment", "default", "tiny-main"]
    for owners in ([], [{"uid": "uid-of-its-predecessor", "controller": True}], [{"uid": "uid-tiny"}]):
        api.put({**mine, "metadata": {**mine["metadata"], "ownerReferences": owners}})
        assert await actuator.targets() == []
        api.calls.clear()
        await actuator.scale(ID, 4, [])
        assert api.calls == []


async def test_a_pod_of_the_future_is_new(actuator: Any, api: Any) -> None:
    """The API server's clock is ahead of ours."""
    starting = api.objects["Pod", "default", "c"]
    api.put({**starting, "metadata": {**starting["metadata"], "creationTimestamp": "2999-01-01T00:00:00Z"}})
    (model,) = await actuator.targets()
    (starting,) = model.pools["main"].starting
    assert 0 <= starting.age_s < 3600


def _pod(uid: str, *, ready: str | None = None, lost: str | None = None) -> dict[str, Any]:
    """Created at 12:00:00, its container started ten seconds later; ready since then, or not ready any more since then."""
    status = {
        "type": "Ready",
        "status": "True" if ready else "False",
        "lastTransitionTime": ready or lost or "2026-01-01T12:00:01Z",
    }
    return {
        "metadata": {"uid": uid, "creationTimestamp": "2026-01-01T12:00:00Z"},
        "status": {
            "conditions": [status],
            "containerStatuses": [{"name": "engine", "state": {"running": {"startedAt": "2026-01-01T12:00:10Z"}}}],
        },
    }


def test_a_start_is_the_time_from_creation_to_the_first_readiness() -> None:
    ages = Ages()
    assert ages.of("p", [_pod("a")]).started_s == ()
    assert ages.of("p", [_pod("a"), _pod("quick", ready="2026-01-01T12:00:20Z")]).started_s == (20.0,), "ready between two looks"
    assert ages.of("p", [_pod("a", ready="2026-01-01T12:05:00Z")]).started_s == (300.0,)
    assert ages.of("p", [_pod("a", lost="2026-01-01T13:00:00Z")]).started_s == ()
    assert ages.of("p", [_pod("a", ready="2026-01-01T13:00:30Z")]).started_s == (), "a blip is no start"


def test_a_pod_that_goes_before_it_is_ready_teaches_nothing() -> None:
    ages = Ages()
    assert ages.of("p", [_pod("pending"), _pod("starts")]).started_s == ()
    going = _pod("pending", ready="2026-01-01T12:40:00Z")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T12:40:00Z"
    assert ages.of("p", [going, _pod("starts")]).started_s == ()
    assert ages.of("p", [_pod("starts", ready="2026-01-01T12:01:00Z")]).started_s == (60.0,)


def test_what_an_operator_finds_when_it_starts_teaches_nothing_but_first_readiness() -> None:
    ages = Ages()
    found = [_pod("ready", ready="2026-01-01T13:00:00Z"), _pod("blip", lost="2026-01-01T13:00:00Z"), _pod("starts")]
    assert ages.of("p", found).started_s == ()
    later = "2026-01-01T13:10:00Z"
    then = [_pod("ready", ready="2026-01-01T13:00:00Z"), _pod("blip", ready=later), _pod("starts", ready="2026-01-01T12:01:00Z")]
    assert ages.of("p", then).started_s == (60.0,)


async def test_a_pod_in_trouble_is_told_from_one_that_merely_starts(actuator: Any, api: Any) -> None:
    starting = api.objects["Pod", "default", "c"]
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    status = {**starting["status"], "containerStatuses": [{"name": "engine", "state": waiting}]}
    (model,) = await actuator.targets()
    assert [it.troubled for it in model.pools["main"].starting] == [False]
    api.put({**starting, "status": status})
    (model,) = await actuator.targets()
    assert [it.troubled for it in model.pools["main"].starting] == [True]


def test_ages_go_by_our_own_clock_from_the_second_look_on() -> None:
    now = 1000.0
    ages = Ages(lambda: now)

    def pod(uid: str, created: str) -> dict[str, Any]:
        return {"metadata": {"uid": uid, "creationTimestamp": created}}

    there = [pod("a", "2999-01-01T00:00:00Z")]
    assert ages.of("p", there).ages_s == {"a": 0.0}
    now += 5
    assert ages.of("p", there).ages_s == {"a": 5.0}
    there.append(pod("b", "1999-01-01T00:00:00Z"))
    now += 5
    assert ages.of("p", there).ages_s == {"a": 10.0, "b": 5.0}, "it was not there at the last look, five seconds ago"
    now += 5
    assert ages.of("p", there).ages_s == {"a": 15.0, "b": 10.0}
    assert ages.of("q", there).ages_s["b"] > 1e8, "of what is found at first, only its creation time is known"
    ages.keep({"q"})
    assert ages.of("p", there).ages_s["a"] == 0.0


def told(current: int, decision: Decision, *, acted: bool = False, dry_run: bool = False, seconds: float = 30) -> Record:
    return Record(ID, current, decision, Learned(cold_start_s=seconds, slo_factor=1.2), acted=acted, dry_run=dry_run)


async def test_decisions_are_told_once(actuator: Any, api: Any, changed: list[Key]) -> None:
    assert actuator.report(ID) is None
    await actuator.record(told(2, Decision(3, "Demand", "3 are needed"), acted=True))
    await actuator.record(told(3, Decision(3, "DownWindow", "was 3 lately")))
    await actuator.record(told(3, Decision(3, "DownWindow", "was 3 a moment ago"), seconds=31))
    report = actuator.report(ID)
    assert (report.current, report.desired, report.constraint, report.reason) == (3, 3, "DownWindow", "was 3 lately")
    assert len(report.decisions) == 1
    assert "2 to 3 (Demand): 3 are needed" in report.decisions[0]
    assert len(changed) == 2
    assert [event["message"] for event in api.posted] == ["pool main: 2 to 3 replicas: 3 are needed"]
    stuck = Decision(3, "DownWindow", "8 wait for lora", inputs={"waiting_for_lora": 8})
    await actuator.record(told(3, stuck))
    assert actuator.report(ID).reason == "8 wait for lora", "what waits is no mere figure"
    await actuator.record(told(3, Decision(3, "NoData", "no gateway answered", blind=True)))
    assert actuator.report(ID).idle == "NoData"
    await actuator.record(told(3, Decision(4, "Demand", "4 are needed"), dry_run=True))
    assert actuator.report(ID).idle == "DryRun", "a dry run acts on nothing"


async def test_a_pool_that_is_gone_is_told_of_no_more(actuator: Any, registry: CollectorRegistry) -> None:
    def pools() -> set[str]:
        samples = (it for family in registry.collect() for it in family.samples if "pool" in it.labels)
        return {it.labels["pool"] for it in samples}

    await actuator.targets()
    await actuator.record(told(2, Decision(3, "Demand", "3 are needed")))
    await actuator.targets()
    assert pools() == {"main"} and actuator.report(ID) is not None
    actuator._resources.drop(Key("InferenceModel", "default", "tiny"))
    await actuator.targets()
    assert pools() == set() and actuator.report(ID) is None


async def test_what_was_learned_and_decided_outlives_the_operator(actuator: Any, make: Any, changed: list[Key]) -> None:
    await actuator.record(told(2, Decision(3, "Demand", "3 are needed"), acted=True, seconds=80))
    pool = PoolObserved("main", "r1", 3, None, [], scaled=True, scaling=actuator.report(ID))
    resource = make.resource(pools=[{"name": "main", "scaling": SCALING}])
    resource["status"] = status_of(Observed("tiny", 1, [pool]), [], "2026-01-01T00:00:00Z")
    resource["metadata"]["resourceVersion"] = "7"
    assert restored(resource) == {"main": Learned(cold_start_s=80, slo_factor=1.2)}
    actuator._resources.put(resource)
    (model,) = await actuator.targets()
    assert model.pools["main"].learned == Learned(cold_start_s=80, slo_factor=1.2)
    actuator._reports.clear()
    await actuator.record(told(3, Decision(3, "Demand", "")))
    assert len(actuator.report(ID).decisions) == 1


async def test_a_status_that_is_not_understood_is_learned_anew(actuator: Any, make: Any) -> None:
    good = {"pool": "main", "current": 1, "desired": 1, "constraint": "Demand", "reason": "", "decisions": []}
    resource = make.resource(pools=[{"name": "main", "scaling": SCALING}])
    absurd = {
        **good,
        "pool": "other",
        "learned": {"coldStartSeconds": 10**18, "sloPercent": 10**9, "stepBaseMicroseconds": 10**18},
    }
    resource["status"] = {"scaling": [{**good, "ofALaterVersion": 1}, {"pool": 7}, absurd]}
    resource["metadata"]["resourceVersion"] = "8"
    actuator._resources.put(resource)
    (model,) = await actuator.targets()
    assert model.pools["main"].learned is None
    memory = restore(restored(resource)["other"])
    assert memory.cold_start.seconds <= 3600
    assert memory.capacity.line.base <= 3600
    assert memory.correction.factor <= 2


async def test_a_pool_whose_replicas_span_nodes_is_scaled_and_one_that_is_gone_is_not_made_anew(actuator: Any, api: Any) -> None:
    deployment = api.objects["Deployment", "default", "tiny-main"]
    await api.delete(deployment)
    api.calls.clear()
    await actuator.scale(ID, 3, [])
    assert api.calls == []
    api.put({**deployment, "kind": "LeaderWorkerSet"})
    (model,) = await actuator.targets()
    assert model.pools["main"].replicas == 2
    await actuator.scale(ID, 3, [])
    assert api.objects["LeaderWorkerSet", "default", "tiny-main"]["spec"]["replicas"] == 3


def test_a_schedule_that_cannot_be_read_is_refused_by_name(make: Any) -> None:
    hint = {"start": "0 31 * * *", "duration": "1h", "min": 2}
    pools = [{"name": "main", "scaling": {"max": 4, "schedule": [hint]}}]
    _, refusal = accept(make.resource(pools=pools))
    assert refusal is not None and "pools[0].scaling.schedule[0].start" in refusal.message


async def test_a_pool_that_another_sizes_too_is_only_told_about(
    api: Any, make: Any, actuator: KubernetesActuator, others: dict[Target, str]
) -> None:
    actuator._resources.put(make.resource(pools=[{"name": "main", "scaling": SCALING | {"mode": "Auto"}}]))
    (alone,) = await actuator.targets()
    assert not alone.pools["main"].dry_run
    others[Target("default", "Deployment", "tiny-main")] = "theirs"
    (contested,) = await actuator.targets()
    assert contested.pools["main"].dry_run
