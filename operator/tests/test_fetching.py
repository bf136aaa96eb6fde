"""Models that a Job brings before replicas start."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from operator_world import World

from penstock.api import labels
from penstock.operator import fetching
from penstock.operator.desired.source import MOUNT, fetch_job

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CACHED = {"uri": "hf://org/name", "revision": "main", "secretRef": {"name": "hf-token"}, "cache": {"claimName": "weights"}}


@pytest.fixture
def world(api, make):
    return World(api, make)


def job(world: World) -> Any:
    (found,) = [it for (kind, _, _), it in world.api.objects.items() if kind == "Job"]
    return found


def pod(world: World, result: Any, phase: str = "Succeeded", code: int = 0, name: str = "f", **more: Any) -> None:
    """The Job's pod has ended so."""
    ended = {"terminated": {"exitCode": code, "message": json.dumps(result)}}
    meta = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {labels.FETCH_OF: "tiny", "batch.kubernetes.io/job-name": job(world)["metadata"]["name"]},
    }
    status = {"phase": phase, "containerStatuses": [{"name": "fetch", "state": ended}] if result else [], **more}
    world.children.observe("FetchPod", fetching_change(meta, status))


def fetching_change(meta: Any, status: Any) -> Any:
    from penstock.kube.cache import Change

    return Change((meta["namespace"], meta["name"]), None, {"kind": "Pod", "metadata": meta, "status": status})


def ends(world: World, kind: str, ago_s: float = 0) -> None:
    when = (datetime.now(UTC) - timedelta(seconds=ago_s)).isoformat()
    world.api.put({**job(world), "status": {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": when}]}})


async def finished(world: World, make: Any, key: Any, **changes: Any) -> None:
    await world.apply(make.resource(source=CACHED, **changes))
    await world.settle(key)
    pod(world, {"folder": f"hf--org--name--{COMMIT}", "version": COMMIT, "size": 7})
    ends(world, "Complete")
    await world.settle(key)


def engine(world: World) -> Any:
    return world.live("Deployment")["spec"]["template"]["spec"]["containers"][0]


async def test_replicas_are_made_when_the_job_is_done_and_mount_what_it_brought(world, make, key):
    await world.apply(make.resource(source=CACHED))
    await world.settle(key)
    assert not any(kind == "Deployment" for kind, _, _ in world.api.objects)
    assert world.condition("ModelAvailable")[:2] == ("Unknown", "FetchStarting")
    spec = job(world)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["args"][:3] == ["hf://org/name", "--revision=main", f"--to={MOUNT}"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "HF_TOKEN"}}} in container["env"]
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "weights"}
    assert labels.MODEL not in job(world)["spec"]["template"]["metadata"]["labels"], "it is no replica"
    await finished(world, make, key)
    assert engine(world)["args"][0] == f"{MOUNT}/hf--org--name--{COMMIT}"
    assert engine(world)["volumeMounts"] == [{"name": "penstock-models", "mountPath": MOUNT, "readOnly": True}]
    assert "HF_TOKEN" not in [it["name"] for it in engine(world)["env"]], "who does not download needs no token"
    assert world.condition("ModelAvailable")[1] == "NotLoadedYet"


async def test_what_was_found_out_outlives_the_pod_and_a_template_the_job(world, make, key):
    await finished(world, make, key)
    world.children.observe("FetchPod", type(fetching_change({"namespace": "default", "name": "f"}, {}))(
        ("default", "f"), world.children.of(key, "FetchPod")["f"], None
    ))  # fmt: skip
    await world.settle(key)
    assert engine(world)["args"][0].endswith(COMMIT)
    await world.api.delete(job(world))
    await world.apply(make.resource(source=CACHED, generation=2, replicas=3))
    await world.settle(key)
    assert world.live("Deployment")["spec"]["replicas"] == 3, "what runs is not held up"
    assert job(world), "and the model is looked after again"


async def test_a_change_waits_and_what_ran_goes_on(world, make, key):
    await finished(world, make, key)
    before = world.live("Deployment")["spec"]
    old = job(world)["metadata"]["name"]
    other = {**CACHED, "uri": "hf://org/other"}
    await world.apply(make.resource(source=other, generation=2))
    await world.settle(key)
    assert world.live("Deployment")["spec"] == before
    assert world.condition("Ready")[:2] == ("False", "FetchStarting")
    new = next(name for kind, _, name in world.api.objects if kind == "Job" and name != old)
    meta = {"name": "g", "namespace": "default", "uid": "g", "creationTimestamp": "2026-01-01T00:00:00Z"}
    meta["labels"] = {labels.FETCH_OF: "tiny", "batch.kubernetes.io/job-name": new}
    ended = {"terminated": {"exitCode": 0, "message": json.dumps({"folder": "x", "version": "y"})}}
    world.children.observe("FetchPod", fetching_change(meta, {"containerStatuses": [{"name": "fetch", "state": ended}]}))
    done = {"conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    world.api.put({**world.api.objects["Job", "default", new], "status": done})
    await world.settle(key)
    assert engine(world)["args"][0] == f"{MOUNT}/x"
    assert job(world)["metadata"]["name"] == new, "the other Job is pruned"


@pytest.mark.parametrize("reason", ["Unauthorized", "Forbidden", "NotFound"])
async def test_a_refusal_is_a_condition_with_source_and_secret(world, make, key, reason):
    await world.apply(make.resource(source=CACHED))
    await world.settle(key)
    pod(world, {"reason": reason, "message": "hf://org/name: no"}, phase="Failed", code=3)
    ends(world, "Failed")
    await world.settle(key)
    told = ("False", f"Source{reason}", "hf://org/name: no (credentials: Secret hf-token)")
    assert world.condition("ModelAvailable") == world.condition("Ready") == told
    assert world.condition("Degraded")[0] == "True"
    assert any(it["reason"] == f"Source{reason}" for it in world.api.posted)
    ends(world, "Failed", ago_s=fetching.RETRY_S + 1)
    before = job(world)["metadata"]["uid"]
    await world.settle(key)
    await world.settle(key)
    assert job(world)["metadata"]["uid"] != before, "a grant may have come since"


async def test_no_room_and_a_claim_that_is_missing_are_told(world, make, key):
    await world.apply(make.resource(source=CACHED))
    await world.settle(key)
    missing = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": 'claim "weights" not found'}
    pod(world, None, phase="Pending", conditions=[missing])
    await world.settle(key)
    assert world.condition("ModelAvailable")[:2] == ("False", "Unschedulable")
    assert 'claim "weights" not found' in world.condition("ModelAvailable")[2]
    pod(world, {"reason": "NoSpace", "message": "hf://org/name: the volume is full"}, phase="Failed", code=3, name="g")
    ends(world, "Failed")
    await world.settle(key)
    assert world.condition("ModelAvailable") == ("False", "SourceNoSpace", "hf://org/name: the volume is full")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ('{"phase": "downloading", "done": 3221225472, "total": 4294967296, "waits_for": ""}', "downloading, 75% of 4.00 GiB"),
        ("[]", "its pod does not say yet how far it is"),
        ('{"phase": "downloading"}', "its pod does not say yet how far it is"),
        ('{"phase": "downloading", "done": "3", "total": 4}', "its pod does not say yet how far it is"),
        ('{"phase": "downloading", "done": 1, "total": 1' + 400 * "0" + "}", "asking what there is"),
        ('{"phase": "downloading", "done": 1, "total": -4}', "asking what there is"),
        ("[" * 4000, "its pod does not say yet how far it is"),
        (" " * 100_000, "its pod does not say yet how far it is"),
    ],
)
async def test_the_status_says_how_far_it_is(world, make, key, unused_tcp_port, monkeypatch, answer, told):
    async def progress(_: web.Request) -> web.Response:
        return web.json_response(text=answer)

    app = web.Application()
    app.add_routes([web.get("/progress", progress)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    monkeypatch.setattr(fetching, "PROGRESS_PORT", unused_tcp_port)
    try:
        await world.apply(make.resource(source=CACHED))
        await world.settle(key)
        pod(world, None, phase="Running", podIP="127.0.0.1")
        await world.settle(key)
    finally:
        await runner.cleanup()
    assert world.condition("ModelAvailable") == ("Unknown", "Downloading", f"hf://org/name: {told}")
    assert (key, fetching.LOOK_S) in world.looks


@pytest.mark.parametrize(
    "result", [["x"], {"version": 7}, {"folder": "only"}, {"reason": ["NotFound"]}, {"reason": "NotFound", "message": 4}, {}]
)
async def test_what_another_image_leaves_behind_is_no_result(world, make, key, result):
    await world.apply(make.resource(source=CACHED))
    await world.settle(key)
    pod(world, result, phase="Failed", code=1)
    await world.settle(key)
    assert world.condition("ModelAvailable")[1] == "FetchFailed"
    before = job(world)["metadata"]["uid"]
    pod(world, result, name="g")
    ends(world, "Complete")
    await world.settle(key)
    await world.settle(key)
    assert job(world)["metadata"]["uid"] != before, "nobody knows what was brought: it is looked for again"
    assert not any(kind == "Deployment" for kind, _, _ in world.api.objects)


async def test_a_note_that_somebody_else_has_written_is_none(world, make, key):
    await finished(world, make, key)
    note = job(world)
    annotations = {**note["metadata"]["annotations"], fetching.RESULT: "mine"}
    world.api.put({**note, "metadata": {**note["metadata"], "annotations": annotations}})
    await world.settle(key)
    assert job(world)["metadata"]["annotations"][fetching.RESULT] != "mine"
    assert world.condition("Accepted")[0] == "True"


async def test_an_unfinished_job_with_another_image_is_made_anew(world, make, key):
    await world.apply(make.resource(source=CACHED))
    await world.settle(key)
    await world.apply(make.resource(source=CACHED, generation=2, engine={"image": "other:2"}))
    await world.settle(key)
    await world.settle(key)
    assert job(world)["spec"]["template"]["spec"]["containers"][0]["image"] == "other:2"


async def test_without_a_cache_the_job_only_finds_the_commit(world, make, key):
    await world.apply(make.resource(source={"uri": "hf://org/name", "revision": "main"}))
    await world.settle(key)
    assert "volumes" not in job(world)["spec"]["template"]["spec"]
    pod(world, {"folder": "", "version": COMMIT, "size": 0})
    ends(world, "Complete")
    await world.settle(key)
    assert engine(world)["args"][:2] == ["hf://org/name", f"--revision={COMMIT}"]


async def test_a_claim_with_the_model_is_mounted_without_a_job(world, make, key):
    await world.apply(make.resource(source={"uri": "pvc://weights/team/llama"}))
    await world.settle(key)
    assert engine(world)["args"][0] == f"{MOUNT}/team/llama"
    assert engine(world)["volumeMounts"][0]["readOnly"] is True


async def test_the_operator_makes_the_claim_of_a_cache_and_deletes_it_with_the_cache(world, make, key):
    world.reconciler = world.new_reconciler(storage_class="fast")
    await world.apply(make.resource(source={**CACHED, "cache": {"size": "200Gi"}}))
    await world.settle(key)
    claim = world.live("PersistentVolumeClaim", "tiny-models")
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "200Gi"}},
        "storageClassName": "fast",
    }
    assert claim["metadata"]["ownerReferences"][0]["name"] == "tiny"
    volumes = job(world)["spec"]["template"]["spec"]["volumes"]
    assert volumes == [{"name": "penstock-models", "persistentVolumeClaim": {"claimName": "tiny-models"}}]
    pod(world, {"folder": "f", "version": COMMIT, "size": 7})
    ends(world, "Complete")
    await world.settle(key)
    assert engine(world)["args"][0] == f"{MOUNT}/f"
    world.reconciler = world.new_reconciler(storage_class="slow")
    await world.apply(make.resource(source={**CACHED, "cache": {"size": "300Gi"}}))
    await world.settle(key)
    grown = world.live("PersistentVolumeClaim", "tiny-models")
    assert grown["metadata"]["uid"] == claim["metadata"]["uid"]
    assert grown["spec"]["resources"]["requests"]["storage"] == "300Gi"
    assert grown["spec"]["storageClassName"] == "fast", "the class of a claim cannot change"
    await world.apply(make.resource(source={"uri": "/m"}))
    await world.settle(key)
    assert not any(kind == "PersistentVolumeClaim" for kind, _, _ in world.api.objects)


async def test_a_nodes_folder_needs_no_job_but_for_the_commit(world, make, key):
    world.reconciler = world.new_reconciler(node_cache="/var/models")
    await world.apply(make.resource(source={"uri": "hf://org/name", "revision": "main", "cache": {"type": "Node"}}))
    await world.settle(key)
    assert "volumes" not in job(world)["spec"]["template"]["spec"]
    pod(world, {"folder": "", "version": COMMIT, "size": 0})
    ends(world, "Complete")
    await world.settle(key)
    assert engine(world)["args"][:2] == ["hf://org/name", f"--revision={COMMIT}"]


def test_a_job_is_for_a_claim_a_model_a_version_and_a_restart(make):
    def name(**changes: Any) -> str:
        source = {**CACHED, **changes.pop("source", {})}
        return fetch_job(make.model(source=source, **changes), "i")["metadata"]["name"]

    again = {"rollout": {"restartedAt": "2026-02-01T12:00:00Z"}}
    others = [
        name(source={"uri": "hf://org/b"}),
        name(source={"revision": "dev"}),
        name(source={"cache": {"claimName": "c"}}),
        name(**again),
    ]
    assert len({name(), *others}) == 5
    assert name() == name(engine={"image": "other:2"}) == name(replicas=4) == name(source={"secretRef": {"name": "x"}})
    fixed = {"source": {"revision": COMMIT}}
    assert name(**fixed) == name(**fixed, **again), "a commit does not move"
    assert fetch_job(make.model(source={"uri": "hf://org/name", "revision": COMMIT}), "i") is None


def test_the_job_has_the_secret_s_keys_and_the_replicas_proxies(make):
    template = {
        "spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "containers": [{"name": "engine", "env": [{"name": "HTTPS_PROXY", "value": "p"}]}],
        }
    }
    source = {"uri": "s3://b/m", "secretRef": {"name": "aws"}, "cache": {"claimName": "c"}}
    spec = fetch_job(make.model(source=source, pools=[{"name": "main", "template": template}]), "i")["spec"]["template"]["spec"]
    environment = {it["name"]: it for it in spec["containers"][0]["env"]}
    optional = {
        name: it["valueFrom"]["secretKeyRef"].get("optional", False)
        for name, it in environment.items()
        if name.startswith("AWS_")
    }
    must = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), False)
    assert optional == must | dict.fromkeys(("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"), True)
    assert "HTTPS_PROXY" in environment
    assert spec["imagePullSecrets"] == [{"name": "pull"}]


def test_the_job_is_placed_as_the_replicas_are_but_has_no_devices(make):
    nodes = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": []}]}}
    placed = {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "serving",
        "affinity": {"nodeAffinity": nodes, "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
    }
    claimed = {"claims": [{"name": "gpu"}], "limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}}

    def pod_of(**engine: Any) -> Any:
        template = {"spec": {**placed, "containers": [{"name": "engine", **engine}]}}
        return fetch_job(make.model(source=CACHED, pools=[{"name": "main", "template": template}]), "i")["spec"]["template"][
            "spec"
        ]

    found = pod_of(resources=claimed)
    assert {name: found[name] for name in placed} == {**placed, "affinity": {"nodeAffinity": nodes}}
    assert found["containers"][0]["resources"] == {"limits": {"memory": "64Gi"}, "requests": {"cpu": "1"}}
    assert pod_of()["containers"][0]["resources"] == {"requests": {"cpu": "1", "memory": "2Gi"}}


def test_replicas_of_other_versions_exchange_no_blocks(make):
    from penstock.operator.desired.pod import kv_layout
    from penstock.operator.desired.source import Fetched

    model = make.model(source=CACHED)
    one = Fetched("f", "a")
    assert kv_layout(model, model.spec.pools[0], one) != kv_layout(model, model.spec.pools[0], replace(one, version="b"))
