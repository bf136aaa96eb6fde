"""Reconciling against an API server in memory: what is applied, left alone, taken back, and said."""

import json
from dataclasses import replace
from typing import Any

import pytest
from kubernetes.aio.client import ApiException
from operator_world import World

from penstock.operator.autoscale.learned import Learned
from penstock.operator.observed import ScalingStatus
from penstock.operator.restrictions import Allowances
from penstock.operator.store import Key

SCALED = [{"name": "main", "scaling": {"min": 2, "max": 4}}]


@pytest.fixture
def world(api: Any, make: Any) -> World:
    return World(api, make)


async def test_a_model_is_realised_and_then_left_alone(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=2))
    await world.settle(key)
    assert {kind for kind, _, name in world.api.objects if name == "tiny-main"} == {
        "Deployment",
        "Service",
        "NetworkPolicy",
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


async def test_a_pools_network_policy_stays_until_the_last_of_its_replicas_has_drained(world: World, key: Key) -> None:
    await world.apply(world.make.resource(pools=[{"name": "main"}, {"name": "extra"}]))
    await world.settle(key)
    draining = world.make.ready_pod("tiny-extra-1", pool="extra")
    draining["metadata"]["deletionTimestamp"] = "2026-02-01T00:00:00Z"
    world.api.put(draining)
    world.api.put(world.make.ready_pod("tiny-main-1"))
    await world.apply(world.make.resource())
    await world.settle(key)
    assert [kind for kind, _, name in world.api.objects if name == "tiny-extra"] == ["NetworkPolicy"]
    world.queued.clear()
    await world.api.delete(draining)
    assert key in world.queued
    await world.settle(key)
    assert not [name for _, _, name in world.api.objects if name == "tiny-extra"]
    assert world.live("NetworkPolicy")


async def test_a_template_that_runs_already_is_not_held_to_a_newer_operators_rules(world: World, key: Key) -> None:
    """Only what would be a new revision is: an upgrade of the operator leaves running models alone."""
    pools = [{"name": "main", "template": {"spec": {"nodeName": "node-1"}}}]
    lenient = replace(world.make.rendering, allowances=Allowances(node_name=True))
    world.reconciler._rendering = lenient
    await world.apply(world.make.resource(pools=pools))
    await world.settle(key)
    world.reconciler._rendering = world.make.rendering
    await world.apply(world.make.resource(pools=pools, drainTimeout="60s"))
    await world.settle(key)
    assert world.condition("Accepted")[1] == "ForbiddenTemplate", "a longer drain is a new template"
    await world.apply(world.make.resource(pools=pools))
    await world.settle(key)
    assert world.condition("Accepted")[0] == "True"
    assert world.live("Deployment")["spec"]["template"]["spec"]["nodeName"] == "node-1"


EXPOSED = {"inferencePool": {"picker": {"name": "penstock-picker"}, "gateway": {"name": "web", "namespace": "edge"}}}


async def test_kinds_that_the_cluster_lacks_are_left_out_and_made_when_they_come(world: World, key: Key) -> None:
    world.absent = {"InferencePool", "HTTPRoute"}
    await world.apply(world.make.resource(routing=EXPOSED))
    await world.settle(key)
    assert world.condition("Accepted")[0] == "True"
    assert not [kind for kind, _, _ in world.api.objects if kind in world.absent]
    world.absent = set()
    await world.settle(key)
    pool, route = world.live("InferencePool", "tiny"), world.live("HTTPRoute", "tiny")
    assert pool["spec"]["endpointPickerRef"]["name"] == "penstock-picker"
    assert route["spec"]["parentRefs"] == [{"name": "web", "namespace": "edge"}]
    await world.apply(world.make.resource())
    await world.settle(key)
    assert not {kind for kind, _, _ in world.api.objects} & {"InferencePool", "HTTPRoute"}


SPANNING = {
    "parallelism": {"tensor": 8, "pipeline": 2},
    "accelerator": {"resource": "nvidia.com/gpu", "perNode": 8},
    "name": "main",
}


async def test_a_replica_that_spans_nodes_needs_leader_worker_sets(
    world: World, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.operator.acceptance.unsupported", lambda spec: [])  # as if the engine could already
    world.absent = {"LeaderWorkerSet"}
    await world.apply(world.make.resource(pools=[SPANNING]))
    await world.settle(key)
    assert world.condition("Accepted")[1] == "LeaderWorkerSetMissing"
    assert [kind for kind, _, _ in world.api.objects] == ["InferenceModel"]
    world.absent = set()
    await world.settle(key)
    live = world.live("LeaderWorkerSet")
    assert {it["manager"] for it in live["metadata"]["managedFields"]} == {"penstock-scale"}, "its size is others' to decide"
    assert (live["spec"]["replicas"], live["spec"]["leaderWorkerTemplate"]["size"]) == (1, 2)
    group = live["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    for template in (leader, worker):
        (engine,) = template["spec"]["containers"]
        assert engine["resources"]["limits"] == {"nvidia.com/gpu": "8"}, "its share of a node, not all of the replica"
    assert leader["metadata"]["labels"]["penstock.dev/model"] == "tiny"
    assert "penstock.dev/model" not in worker["metadata"]["labels"], "a worker is no replica"
    assert "readinessProbe" not in worker["spec"]["containers"][0]
    rolling = live["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert rolling == {"maxUnavailable": "1%", "maxSurge": 1}, "a StatefulSet refuses 0"
    assert live["spec"]["networkConfig"] == {"subdomainPolicy": "UniquePerReplica"}, "workers find a leader that is not ready"
    assert ("Deployment", "default", "tiny-main") not in world.api.objects


async def test_groups_of_a_paused_rollout_do_not_surge(world: World, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.operator.acceptance.unsupported", lambda spec: [])
    await world.apply(world.make.resource(pools=[SPANNING], rollout={"paused": True}))
    await world.settle(key)
    rolling = world.live("LeaderWorkerSet")["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert rolling == {"maxUnavailable": 1, "maxSurge": 0, "partition": 1000}, "nor does any group change"


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
    world.reports["default/tiny/main"] = ScalingStatus(2, 3, "Demand", "3 are needed", decisions=("2 to 3",))
    await world.apply(world.make.resource(pools=SCALED))
    await world.settle(key)
    (told,) = world.live("InferenceModel")["status"]["scaling"]
    assert (told["desired"], told["constraint"], told["decisions"]) == (3, "Demand", ["2 to 3"])
    assert world.condition("ScalingActive")[0] == "True"
    world.reports.clear()  # as after a restart
    await world.apply(world.live("InferenceModel"))
    await world.settle(key)
    assert world.condition("ScalingActive")[:2] == ("Unknown", "NoReport")
    assert world.live("InferenceModel")["status"]["scaling"] == [told], "what an earlier autoscaler wrote down is gone"


async def test_what_was_learned_of_a_pool_stays_while_its_spec_is_refused(world: World, key: Key) -> None:
    learned = Learned(cold_start_s=80)
    world.reports["default/tiny/main"] = ScalingStatus(2, 3, "Demand", "3 are needed", decisions=("2 to 3",), learned=learned)
    await world.apply(world.make.resource(pools=SCALED))
    await world.settle(key)
    before = world.live("InferenceModel")["status"]["scaling"]
    assert before[0]["learned"]["coldStartSeconds"] == 80
    world.reports.clear()  # the autoscaler looks at no model that is refused
    for wrong in ({"replicas": 2, "pools": SCALED}, {"pools": SCALED, "engine": {"quantization": {"weights": "fp8"}}}):
        await world.apply(world.make.resource(**wrong))
        await world.settle(key)
        assert world.condition("Accepted")[0] == "False"
        assert world.live("InferenceModel")["status"]["scaling"] == before
    await world.apply(world.make.resource(replicas=2))
    await world.settle(key)
    assert world.live("InferenceModel")["status"]["scaling"] == []


async def test_unsupported_fields_are_refused_by_name_and_nothing_is_changed(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=2))
    await world.settle(key)
    before = world.live("Deployment")
    await world.apply(world.make.resource(replicas=1, engine={"quantization": {"weights": "fp8"}}))
    await world.settle(key)
    assert world.live("Deployment") == before
    status, reason, message = world.condition("Accepted")
    assert (status, reason) == ("False", "UnsupportedField")
    assert "spec.engine.quantization.weights (fp8; int8_per_channel_weight_only, int8_per_group_32" in message
    assert [event["reason"] for event in world.api.posted] == ["UnsupportedField"]


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


@pytest.mark.parametrize(
    "words",
    [
        "failed to create typed patch object (default/tiny-main; apps/v1, Kind=Deployment): "
        ".spec.template.spec.nodeSelectr: field not declared in schema",
        'Internal error occurred: failed calling webhook "policy.example.com": no endpoints available',
        "etcdserver: request is too large",
    ],
)
async def test_a_refusal_that_looks_like_a_breakdown_is_told_too(world: World, key: Key, words: str) -> None:
    world.api.refuse["Deployment"] = ApiException(status=500, reason="Internal Server Error")
    world.api.refuse["Deployment"].body = json.dumps({"kind": "Status", "code": 500, "message": words})
    await world.apply(world.make.resource())
    with pytest.raises(ApiException):
        await world.reconciler.reconcile(key)
    assert world.condition("Accepted")[1:] == ("ApplyRefused", words)
    assert world.condition("Ready")[0] == "False"


@pytest.mark.parametrize("status", [500, 503, 409, 429])
async def test_a_server_that_is_away_is_no_verdict(world: World, key: Key, status: int) -> None:
    world.api.refuse["Service"] = ApiException(status=status, reason="etcdserver: request timed out")
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
    assert [event["reason"] for event in world.api.posted] == ["Serving"]


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
        "'tiny' is served by InferenceModel default/tiny, which is older: choose another name",
    )
    world.queued.clear()
    world.watch.heard("DELETED", world.live("InferenceModel"))
    assert late in world.queued
    await world.settle(late)
    assert world.condition("Routed", "other")[0] == "True"


async def test_an_adapters_older_claim_holds_while_its_model_exists(world: World, key: Key) -> None:
    adapter = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "LoraAdapter",
        "metadata": {**world.make.resource("sql")["metadata"], "creationTimestamp": "2025-01-01T00:00:00Z"},
        "spec": {"modelRef": {"name": "base"}, "served": {"name": "tiny"}, "source": {"uri": "s3://a/b"}},
    }
    await world.apply(adapter)
    await world.apply(world.make.resource())
    await world.settle(key)
    assert world.condition("Routed")[0] == "True"
    world.queued.clear()
    await world.apply(world.make.resource("base", served={"name": "base"}))
    assert key in world.queued
    await world.settle(key)
    assert world.condition("Routed")[1:] == (
        "NameConflict",
        "'tiny' is served by LoraAdapter default/sql, which is older: choose another name",
    )
    world.queued.clear()
    world.watch.heard("DELETED", world.live("InferenceModel", "base"))
    assert key in world.queued
    await world.settle(key)
    assert world.condition("Routed")[0] == "True"


async def test_a_deleted_model_is_left_to_the_garbage_collector(world: World, key: Key) -> None:
    await world.apply(world.make.resource())
    await world.settle(key)
    world.watch.heard("DELETED", world.live("InferenceModel"))
    calls = len(world.api.calls)
    await world.reconciler.reconcile(key)
    assert len(world.api.calls) == calls


async def test_a_model_whose_deletion_a_finalizer_puts_off_is_told_of_truly_and_left_alone(world: World, key: Key) -> None:
    await world.apply(world.make.resource(replicas=1))
    await world.settle(key)
    revision = world.live("Deployment")["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"]
    world.api.put(world.make.ready_pod("tiny-main-a", revision=revision))
    await world.settle(key)
    assert world.condition("Ready")[0] == "True"
    told = len(world.api.posted)
    going = world.make.resource(replicas=3)
    going["metadata"] |= {"deletionTimestamp": "2026-01-02T00:00:00Z", "finalizers": ["example.com/audit"]}
    await world.apply(going)
    await world.settle(key)
    assert world.condition("Ready")[:2] == ("False", "Terminating")
    assert "example.com/audit" in world.condition("Accepted")[2]
    assert world.condition("Serving")[0] == "True", "it does, for as long as it is there"
    assert world.live("Deployment")["spec"]["replicas"] == 1
    world.api.put(world.make.pod("tiny-main-a", revision=revision))
    await world.settle(key)
    assert world.condition("Serving")[0] == "False"
    assert world.live("InferenceModel")["status"]["ready"] == "0/1"
    assert len(world.api.posted) == told, "who deletes it knows"


async def test_children_do_not_come_back_when_the_garbage_collector_is_faster_than_the_watch(world: World, key: Key) -> None:
    await world.apply(world.make.resource())
    await world.settle(key)
    await world.api.delete(world.live("InferenceModel"))
    await world.api.delete(world.live("Service"))
    calls = len(world.api.calls)
    await world.reconciler.reconcile(key)
    assert len(world.api.calls) == calls
    await world.apply(world.make.resource(uid="a-new-one"))
    with pytest.raises(Exception, match="is of a deleted model of this name: it is made anew when the garbage collector has"):
        await world.reconciler.reconcile(key)


@pytest.mark.parametrize("successor", [False, True])
async def test_what_went_while_its_status_was_written_stays_gone(
    world: World, key: Key, monkeypatch: pytest.MonkeyPatch, successor: bool
) -> None:
    """A finalizer ends when the last child does, and so do we write then: the watch may be faster than the answer."""
    await world.apply(world.make.resource())
    await world.settle(key)
    going = world.make.resource(served={"name": "wanted-by-others"})
    going["metadata"] |= {"deletionTimestamp": "2026-01-02T00:00:00Z", "finalizers": ["foregroundDeletion"]}
    await world.apply(going)
    other = Key("InferenceModel", "default", "other")
    await world.apply(world.make.resource("other", served={"name": "wanted-by-others"}))
    apply = world.api.apply

    async def overtaken(body: dict[str, Any], *rest: str) -> dict[str, Any]:
        written: dict[str, Any] = await apply(body, *rest)
        world.watch.heard("DELETED", written)
        if successor:
            world.watch.heard("MODIFIED", world.make.resource(uid="a-new-one"))
        return written

    monkeypatch.setattr(world.api, "apply", overtaken)
    await world.reconciler.reconcile(key)
    left = world.resources.get(key)
    assert (left["metadata"]["uid"] if left else "") == ("a-new-one" if successor else "")
    assert world.resources.conflict(other) == ""


async def test_an_older_version_from_the_watch_does_not_undo_our_own_write(world: World, key: Key) -> None:
    await world.apply(world.make.resource())
    stale = world.live("InferenceModel")
    await world.settle(key)
    world.watch.heard("MODIFIED", stale)
    calls = len(world.api.calls)
    await world.reconciler.reconcile(key)
    assert len(world.api.calls) == calls
