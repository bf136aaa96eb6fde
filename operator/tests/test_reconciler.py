"""Reconciling against an API server in memory: what is applied, left alone, taken back, and said."""

from typing import Any

import pytest
from kubernetes.aio.client import ApiException
from prometheus_client import CollectorRegistry

from penstock.operator.handlers import ResourceWatch
from penstock.operator.reconciler import Reconciler
from penstock.operator.status import ScalingStatus
from penstock.operator.store import Children, Key, Resources

SCALED = [{"name": "main", "scaling": {"min": 2, "max": 4}}]


class World:
    """An operator's parts around an API server in memory."""

    def __init__(self, api: Any, make: Any) -> None:
        self.api, self.make = api, make
        self.resources = Resources()
        self.queued: list[Key] = []
        self.children = Children(self.queued.append)
        api.children = self.children
        self.reports: dict[str, ScalingStatus] = {}
        self.registry = CollectorRegistry()
        self.reconciler = Reconciler(
            api=api,
            resources=self.resources,
            observed=self.children,
            rendering=make.rendering,
            scaling=self.reports.get,
            url="http://gw/v1",
            registry=self.registry,
        )
        self.watch = ResourceWatch(None, self.resources, self.queued.append)  # type: ignore[arg-type]

    async def apply(self, resource: dict[str, Any]) -> None:
        """A user applies a resource."""
        key = (resource["kind"], resource["metadata"]["namespace"], resource["metadata"]["name"])
        old = self.api.objects.get(key, {})
        status = {"status": old["status"]} if "status" in old else {}
        self.api.put({**resource, **status})
        self.watch.seen("MODIFIED", self.api.objects[key])

    async def settle(self, key: Key) -> None:
        """Reconciles until nothing more is done."""
        for _ in range(6):
            before = len(self.api.calls)
            await self.reconciler.reconcile(key)
            if len(self.api.calls) == before:
                return
        raise AssertionError(f"does not come to rest: {self.api.calls[-6:]}")

    def live(self, kind: str, name: str = "") -> dict[str, Any]:
        """An object as the server has it, if not named, the model tiny's."""
        return self.api.objects[kind, "default", name or ("tiny" if kind == "InferenceModel" else "tiny-main")]

    def condition(self, kind: str, name: str = "tiny") -> tuple[str, str, str]:
        """(status, reason, message) of a model's condition."""
        conditions = self.live("InferenceModel", name)["status"]["conditions"]
        found = next(it for it in conditions if it["type"] == kind)
        return found["status"], found["reason"], found["message"]


@pytest.fixture
def world(api: Any, make: Any) -> World:
    return World(api, make)


async def test_a_model_is_realised_and_then_left_alone(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=2))
    await world.settle(key)
    assert {kind for kind, _, name in world.api.objects if name == "tiny-main"} == {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    }
    assert world.live("InferenceModel")["status"]["ready"] == "0/2"
    assert world.live("InferenceModel")["status"]["url"] == "http://gw/v1"
    calls = len(world.api.calls)
    await world.reconciler.reconcile(key)
    assert len(world.api.calls) == calls, "nothing changed, nothing is written"
    assert world.registry.get_sample_value("penstock_operator_reconciles_total", {"result": "ok"})


async def test_drift_is_corrected(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=2))
    await world.settle(key)
    await world.api.delete(world.live("Service"))
    assert world.queued[-1] == key, "the loss of a child wakes the reconciler"
    workload = world.live("Deployment")
    world.api.put({**workload, "spec": {**workload["spec"], "replicas": 5}})
    await world.settle(key)
    assert world.live("Service")["spec"]["clusterIP"] == "None"
    assert world.live("Deployment")["spec"]["replicas"] == 2


async def test_a_field_that_is_no_longer_wanted_is_taken_away(world: World, key: Key) -> None:
    await world.apply(world.make.resource(pools=[{"name": "main", "template": {"spec": {"nodeSelector": {"a": "b"}}}}]))
    await world.settle(key)
    before = world.live("Deployment")["metadata"]["annotations"]["penstock.dev/applied"]
    await world.apply(world.make.resource())
    await world.settle(key)
    assert world.live("Deployment")["metadata"]["annotations"]["penstock.dev/applied"] != before


async def test_what_is_too_much_is_pruned_and_others_objects_are_not(world: World, key: Key) -> None:
    await world.apply(world.make.resource(pools=[{"name": "main"}, {"name": "extra"}]))
    await world.settle(key)
    assert world.live("Deployment", "tiny-extra")
    foreign = {"metadata": {"name": "mine", "namespace": "default", "labels": {"penstock.dev/model": "tiny"}}, "kind": "Service"}
    world.api.put(foreign)
    await world.apply(world.make.resource())
    await world.settle(key)
    assert not [name for _, _, name in world.api.objects if name == "tiny-extra"]
    assert world.live("Service", "mine")


async def test_an_object_that_is_someone_elses_is_not_touched(world: World, key: Key) -> None:
    world.api.put({"kind": "Service", "metadata": {"name": "tiny-main", "namespace": "default"}, "spec": {"theirs": True}})
    await world.apply(world.make.resource())
    with pytest.raises(Exception, match="tiny-main exists and is not this model's"):
        await world.reconciler.reconcile(key)
    assert world.live("Service")["spec"] == {"theirs": True}
    assert world.condition("Accepted")[:2] == ("False", "NotOwned")


async def test_the_autoscalers_size_is_never_written_over(world: World, key: Key) -> None:
    await world.apply(world.make.resource(pools=SCALED))
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 2
    owners = {entry["manager"] for entry in world.live("Deployment")["metadata"]["managedFields"]}
    assert owners == {"penstock-scale"}
    scale = {"kind": "Deployment", "metadata": {"name": "tiny-main", "namespace": "default"}, "spec": {"replicas": 4}}
    await world.api.apply(scale, "penstock-scale")
    await world.apply(world.make.resource(pools=SCALED, engine={"dtype": "float32"}))
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 4
    assert world.live("InferenceModel")["status"]["ready"] == "0/4"


async def test_a_size_is_handed_over_without_a_moment_at_one(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=3))
    await world.settle(key)
    await world.apply(world.make.resource(pools=SCALED))
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 3
    await world.apply(world.make.resource(replicas=1))
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 1


async def test_scaling_reports_reach_the_status(world: World, key: Key) -> None:
    world.reports["default/tiny/main"] = ScalingStatus(2, 3, "Demand", "3 are needed", active=True, decisions=("2 to 3",))
    await world.apply(world.make.resource(pools=SCALED))
    await world.settle(key)
    (told,) = world.live("InferenceModel")["status"]["scaling"]
    assert (told["desired"], told["constraint"], told["decisions"]) == (3, "Demand", ["2 to 3"])
    assert world.condition("ScalingActive")[0] == "True"


async def test_unsupported_fields_are_refused_by_name_and_nothing_is_changed(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=2))
    await world.settle(key)
    before = world.live("Deployment")
    await world.apply(world.make.resource(replicas=1, engine={"speculative": {"method": "ngram"}}))
    await world.settle(key)
    assert world.live("Deployment") == before
    status, reason, message = world.condition("Accepted")
    assert (status, reason) == ("False", "UnsupportedField")
    assert "spec.engine.speculative" in message
    assert [event["reason"] for event in world.api.events] == ["UnsupportedField"]


async def test_a_spec_that_cannot_be_read_is_refused_field_by_field(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=2, pools=SCALED))
    await world.settle(key)
    assert world.condition("Accepted")[1:] == (
        "InvalidSpec",
        "spec: replicas is for a model with one pool and no scaling: remove replicas, or keep one pool and remove its scaling",
    )


async def test_a_forbidden_template_is_refused(world: World, key: Key) -> None:
    await world.apply(world.make.resource(pools=[{"name": "main", "template": {"spec": {"hostNetwork": True}}}]))
    await world.settle(key)
    assert world.condition("Accepted")[1] == "ForbiddenTemplate"
    await world.apply(world.make.resource(pools=[{"name": "main", "template": {"spec": {"containers": [{"image": "x"}]}}}]))
    await world.settle(key)
    assert world.condition("Accepted")[1] == "InvalidTemplate"


async def test_the_servers_refusal_is_told_and_tried_again(world: World, key: Key) -> None:
    world.api.refuse["Deployment"] = ApiException(status=422, reason="x", body=None)
    world.api.refuse["Deployment"].body = '{"message": "spec.template.spec.nodeSelector: Invalid value"}'
    await world.apply(world.make.resource())
    with pytest.raises(ApiException):
        await world.reconciler.reconcile(key)
    assert world.condition("Accepted")[1:] == ("ApplyRefused", "spec.template.spec.nodeSelector: Invalid value")
    world.api.refuse.clear()
    await world.settle(key)
    assert world.condition("Accepted")[0] == "True"


async def test_a_server_that_is_away_is_no_verdict(world: World, key: Key) -> None:
    world.api.refuse["Service"] = ApiException(status=503, reason="Service Unavailable")
    await world.apply(world.make.resource())
    with pytest.raises(ApiException):
        await world.reconciler.reconcile(key)
    assert "status" not in world.live("InferenceModel")


async def test_pods_wake_the_reconciler_and_show_in_the_status(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=1))
    await world.settle(key)
    revision = world.live("Deployment")["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"]
    world.queued.clear()
    world.api.put(world.make.ready_pod("tiny-main-a", revision=revision))
    assert world.queued == [key]
    await world.settle(key)
    assert world.condition("Ready")[:2] == ("True", "Serving")
    assert world.live("InferenceModel")["status"]["ready"] == "1/1"
    assert [event["reason"] for event in world.api.events] == ["Serving"]


async def test_the_oldest_claim_on_a_name_wins_and_a_freed_name_is_noticed(world: World, key: Key) -> None:
    other = world.make.resource("other", served={"name": "tiny"})
    other["metadata"]["creationTimestamp"] = "2026-02-01T00:00:00Z"
    await world.apply(world.make.resource())
    await world.apply(other)
    late = Key("InferenceModel", "default", "other")
    await world.settle(key)
    await world.settle(late)
    assert world.condition("Routed")[0] == "True"
    assert world.condition("Routed", "other")[1:] == (
        "NameConflict",
        "'tiny' is served by default/tiny, which is older: choose another name",
    )
    world.queued.clear()
    world.watch.seen("DELETED", world.live("InferenceModel"))
    assert late in world.queued
    await world.settle(late)
    assert world.condition("Routed", "other")[0] == "True"


async def test_a_deleted_model_is_left_to_the_garbage_collector(world: World, key: Key) -> None:
    await world.apply(world.make.resource())
    await world.settle(key)
    world.watch.seen("DELETED", world.live("InferenceModel"))
    calls = len(world.api.calls)
    await world.reconciler.reconcile(key)
    assert len(world.api.calls) == calls


async def test_children_do_not_come_back_when_the_garbage_collector_is_faster_than_the_watch(world: World, key: Key) -> None:
    await world.apply(world.make.resource())
    await world.settle(key)
    await world.api.delete(world.live("InferenceModel"))
    await world.api.delete(world.live("Service"))
    calls = len(world.api.calls)
    await world.reconciler.reconcile(key)
    assert len(world.api.calls) == calls
    await world.apply(world.make.resource(uid="a-new-one"))
    with pytest.raises(Exception, match="is not this model's"):
        await world.reconciler.reconcile(key)


async def test_an_older_version_from_the_watch_does_not_undo_our_own_write(world: World, key: Key) -> None:
    await world.apply(world.make.resource())
    stale = world.live("InferenceModel")
    await world.settle(key)
    world.watch.seen("MODIFIED", stale)
    calls = len(world.api.calls)
    await world.reconciler.reconcile(key)
    assert len(world.api.calls) == calls


async def test_adapters_say_that_nothing_serves_them(world: World) -> None:
    spec = {"modelRef": {"name": "tiny"}, "served": {"name": "sql"}, "source": {"uri": "s3://a/b"}}
    meta = {"name": "sql", "namespace": "default", "generation": 1, "resourceVersion": "1", "uid": "u"}
    await world.apply({"apiVersion": "penstock.dev/v1alpha1", "kind": "LoraAdapter", "metadata": meta, "spec": spec})
    await world.settle(Key("LoraAdapter", "default", "sql"))
    conditions = world.live("LoraAdapter", "sql")["status"]["conditions"]
    assert {it["type"]: it["reason"] for it in conditions} == {"Ready": "UnsupportedField", "Accepted": "UnsupportedField"}
