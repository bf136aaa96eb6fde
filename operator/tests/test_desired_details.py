"""The figures and branches of child objects that a cluster acts on: probes, ports, users, limits of a rolling update."""

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.api.resources import InferenceModel
from penstock.operator.desired import Rendering, TemplateError, children, engine_args, pod_template, revision_of
from penstock.operator.desired.deployment import limits
from penstock.operator.desired.exposure import inference_pool
from penstock.operator.desired.leader_worker_set import leader_worker_set
from penstock.operator.desired.source import MOUNT, fetch_job

RENDERING = Rendering(image="penstock/engine:test")
SPANNING = {
    "name": "main",
    "parallelism": {"tensor": 8, "pipeline": 2},
    "accelerator": {"resource": "nvidia.com/gpu", "perNode": 8},
}


def deployment_of(model: InferenceModel) -> dict[str, Any]:
    (found,) = (it["spec"] for it in children(model, RENDERING) if it["kind"] == "Deployment")
    return found


def test_a_deployment_waits_before_it_counts_a_new_replica_as_available(make: Any) -> None:
    spec = deployment_of(make.model())
    assert (spec["minReadySeconds"], spec["revisionHistoryLimit"], spec["progressDeadlineSeconds"]) == (5, 2, 1800)


@pytest.mark.parametrize(
    ("rollout", "surge", "replace"),
    [
        ({}, (0, 1), (1, 0)),
        ({"maxSurge": 2}, (0, 2), (1, 0)),
        ({"maxSurge": 3, "maxUnavailable": 2, "allowDowntime": True}, (2, 3), (2, 0)),
    ],
)
def test_a_rollout_without_room_for_more_replicas_takes_old_ones_away_first(
    make: Any, rollout: Any, surge: tuple[int, int], replace: tuple[int, int]
) -> None:
    asked = make.model(rollout=rollout).spec.rollout
    named = [limits(asked, "Surge"), limits(asked, "Replace")]
    assert [(it["maxUnavailable"], it["maxSurge"]) for it in named] == [surge, replace]


def test_probes_have_their_times_and_limits(make: Any) -> None:
    (engine,) = deployment_of(make.model(rollout={"progressDeadline": "12s"}))["template"]["spec"]["containers"]

    def probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
        get = {"path": path, "port": "http", "scheme": "HTTP"}
        return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}

    assert engine["startupProbe"] == probe("/ready", 5, 3), "12 s are three periods"
    assert engine["readinessProbe"] == probe("/ready", 2, 3)
    assert engine["livenessProbe"] == probe("/health", 10, 3)


def test_only_a_restart_leaves_a_mark_and_only_pools_that_exchange_blocks_a_layout(make: Any) -> None:
    assert "annotations" not in deployment_of(make.model())["template"]["metadata"]
    at = "2026-02-01T12:00:00Z"
    restarted = deployment_of(make.model(rollout={"restartedAt": at}))["template"]["metadata"]
    assert restarted["annotations"] == {"penstock.dev/restarted-at": at}


def test_the_kubelet_gives_an_engine_fifteen_seconds_beyond_its_drain(make: Any) -> None:
    pod = deployment_of(make.model(drainTimeout="1500ms"))["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 2 + 15
    assert "--shutdown-timeout=2" in pod["containers"][0]["args"]


def test_a_revision_is_read_from_any_copy_of_the_workload(make: Any) -> None:
    model = make.model(pools=[SPANNING])
    template = pod_template(model, model.spec.pools[0], RENDERING)
    group = leader_worker_set(model, model.spec.pools[0], template)
    for workload in (group, {"kind": "Deployment", "spec": {"template": template}}):
        read = json.loads(json.dumps(workload))
        assert revision_of(read) == template["metadata"]["labels"]["penstock.dev/revision"]


def test_the_models_own_pods_reach_every_port_but_the_administrative_one(make: Any) -> None:
    (policy,) = (it for it in children(make.model(), RENDERING) if it["kind"] == "NetworkPolicy")
    ranges = [(it["port"], it["endPort"], it["protocol"]) for it in policy["spec"]["ingress"][-1]["ports"]]
    assert ranges == [(1, 8002, "TCP"), (8004, 65535, "TCP"), (1, 65535, "UDP")]


def test_a_worker_keeps_everything_of_a_sidecar_and_loses_the_engines_ports_and_probes(make: Any) -> None:
    probed = {"ports": [{"containerPort": 9400}], "readinessProbe": {"tcpSocket": {"port": 9400}}}
    sidecars = [{"name": name, "image": "x", **probed} for name in ("audit", "watch")]
    model = make.model(pools=[{**SPANNING, "template": {"spec": {"containers": sidecars}}}])
    pool = model.spec.pools[0]
    group = leader_worker_set(model, pool, pod_template(model, pool, RENDERING))["spec"]["leaderWorkerTemplate"]
    workers = {it["name"]: it for it in group["workerTemplate"]["spec"]["containers"]}
    assert [workers[it["name"]] for it in sidecars] == sidecars
    assert not workers["engine"].keys() & {"startupProbe", "readinessProbe", "livenessProbe", "ports"}
    assert group["size"] == 2
    (leader,) = (it for it in group["leaderTemplate"]["spec"]["containers"] if it["name"] == "engine")
    assert leader["resources"]["requests"] == {"nvidia.com/gpu": "8", "cpu": "16", "memory": "64Gi"}, "of its node alone"


@pytest.mark.parametrize("paused", [False, True])
def test_a_paused_group_starts_no_replica_of_a_new_revision(make: Any, paused: bool) -> None:
    model = make.model(pools=[SPANNING], rollout={"paused": paused})
    pool = model.spec.pools[0]
    group = leader_worker_set(model, pool, pod_template(model, pool, RENDERING))
    rolling = group["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
    wanted = {"maxUnavailable": 1, "maxSurge": 0, "partition": 1000} if paused else {"maxUnavailable": "1%", "maxSurge": 1}
    assert rolling == wanted


def test_an_http_route_has_a_rule_for_each_64_names_up_to_128(make: Any) -> None:
    routed = {"inferencePool": {"picker": {"name": "p", "port": 9002}, "gateway": {"name": "g"}}}
    model = make.model(served={"name": "m", "aliases": ["a"]}, routing=routed)
    adapters = [f"l{number}" for number in range(140)]
    pool, route = inference_pool(model, adapters)
    rules = route["spec"]["rules"]
    assert [[it["headers"][0]["value"] for it in rule["matches"]] for rule in rules] == [
        ["m", "a", *adapters[:62]],
        adapters[62:126],
    ]
    assert {json.dumps([rule["backendRefs"], rule["timeouts"]]) for rule in rules} == {
        json.dumps([[{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "tiny"}], {"request": "0s"}])
    }
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    assert pool["spec"]["endpointPickerRef"] == {"name": "p", "port": {"number": 9002}, "failureMode": "FailOpen"}


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("/models/a", "/models/a"),
        ("file:///models/a", "file:///models/a"),
        ("hf://org/a", "hf://org/a"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("pvc://claim/team/a", "/penstock/models/team/a"),
        ("pvc://claim", "/penstock/models"),
        ("oci://example.com:5000/team/llama:1", "/penstock/models"),
    ],
)
def test_an_engine_is_told_where_its_weights_are(make: Any, uri: str, told: str) -> None:
    assert engine_args(make.model(source={"uri": uri}))[0] == told
    mounted = "volumes" in deployment_of(make.model(source={"uri": uri}))["template"]["spec"]
    assert mounted == uri.startswith(("pvc://", "oci://"))


def test_an_image_with_the_weights_is_mounted_read_only(make: Any) -> None:
    spec = deployment_of(make.model(source={"uri": "oci://example.com/llama:1"}))["template"]["spec"]
    assert spec["volumes"] == [
        {"name": "penstock-models", "image": {"reference": "example.com/llama:1", "pullPolicy": "IfNotPresent"}}
    ]
    assert spec["containers"][0]["volumeMounts"] == [{"name": "penstock-models", "mountPath": MOUNT, "readOnly": True}]


NODE_CACHED = {"uri": "hf://org/a", "revision": "0123456789abcdef0123456789abcdef01234567", "cache": {"type": "Node"}}


def test_replicas_keep_downloads_in_the_administrators_folder_of_their_node_and_namespace(make: Any) -> None:
    model = make.model(source={**NODE_CACHED, "secretRef": {"name": "hf"}})
    spec = pod_template(model, model.spec.pools[0], replace(make.rendering, node_cache="/var/models"))["spec"]
    assert spec["volumes"] == [{"name": "penstock-models", "hostPath": {"path": "/var/models/default", "type": "Directory"}}]
    (engine,) = spec["containers"]
    assert engine["volumeMounts"] == [{"name": "penstock-models", "mountPath": MOUNT}]
    assert engine["args"][:2] == ["hf://org/a", f"--revision={NODE_CACHED['revision']}"]
    environment = {it["name"]: it for it in engine["env"]}
    assert environment["XDG_CACHE_HOME"]["value"] == MOUNT
    assert "HF_TOKEN" in environment, "each replica downloads for itself"


def test_a_model_alone_does_not_choose_a_folder_of_the_node(make: Any) -> None:
    model = make.model(source=NODE_CACHED)
    with pytest.raises(TemplateError, match="start the operator with --node-cache"):
        pod_template(model, model.spec.pools[0], make.rendering)


def test_claims_of_devices_reach_the_pod_and_the_engine(make: Any) -> None:
    claims = [{"name": "gpus", "template": "two-h100"}, {"name": "nic", "claim": "shared-nic"}]
    spec = deployment_of(make.model(pools=[{"name": "main", "resourceClaims": claims}]))["template"]["spec"]
    assert spec["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": "two-h100"},
        {"name": "nic", "resourceClaimName": "shared-nic"},
    ]
    (engine,) = spec["containers"]
    assert engine["resources"]["claims"] == [{"name": "gpus"}, {"name": "nic"}]
    assert engine["resources"]["requests"] == {"cpu": "2", "memory": "8Gi"}
    assert "--device=cpu" not in engine["args"]


def test_claims_go_with_an_extended_resource(make: Any) -> None:
    pool = {"name": "main", "accelerator": {"resource": "nvidia.com/gpu"}, "resourceClaims": [{"name": "nic", "template": "nic"}]}
    (engine,) = deployment_of(make.model(pools=[pool]))["template"]["spec"]["containers"]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert engine["resources"]["claims"] == [{"name": "nic"}]


def test_a_fetch_runs_as_the_images_user_with_its_own_ports_limits_and_resources(make: Any) -> None:
    containers = [
        {"name": "engine", "resources": {"requests": {"cpu": "3"}}},
        {"name": "exporter", "resources": {"requests": {"cpu": "7"}}},
    ]
    model = make.model(
        source={"uri": "hf://org/a", "cache": {"claimName": "c"}},
        pools=[{"name": "main", "template": {"spec": {"containers": containers}}}],
    )
    job = fetch_job(model, "penstock/engine:test")
    assert job is not None
    spec = job["spec"]["template"]["spec"]
    (fetch,) = spec["containers"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    assert spec["automountServiceAccountToken"] is False
    assert fetch["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert fetch["resources"] == {"requests": {"cpu": "3", "memory": "2Gi"}}
    assert fetch["args"] == [
        "hf://org/a", "--to=/penstock/models", "--result=/run/penstock-fetch/result", "--host=$(POD_IP)", "--port=8002",
    ]  # fmt: skip
    assert fetch["volumeMounts"] == [{"name": "penstock-models", "mountPath": "/penstock/models"}], "the download writes here"
    hopeless, disrupted = job["spec"]["podFailurePolicy"]["rules"]
    assert hopeless["onExitCodes"]["values"] == [3] and hopeless["action"] == "FailJob"
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert job["spec"]["backoffLimit"] == 6


def test_an_owner_is_a_controller_and_pods_get_no_token_or_privilege(make: Any) -> None:
    for it in children(make.model(pools=[SPANNING]), RENDERING):
        assert [owner["controller"] for owner in it["metadata"]["ownerReferences"]] == [True], it["kind"]
    pod = deployment_of(make.model())["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["containers"][0]["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize(
    ("lora", "flags"),
    [
        (None, []),
        ({"slots": 3}, ["--enable-lora", "--max-loras=3", "--max-lora-rank=16", "--allow-runtime-lora-updating"]),
        (
            {"slots": 3, "cpuSlots": 9, "maxRank": 32},
            ["--enable-lora", "--max-loras=3", "--max-cpu-loras=9", "--max-lora-rank=32", "--allow-runtime-lora-updating"],
        ),
    ],
)
def test_room_for_adapters_is_asked_for_by_flags(make: Any, lora: Any, flags: list[str]) -> None:
    sources = {} if lora is None else {"lora": {**lora, "sources": [{"prefix": "file:///a"}]}}
    assert [it for it in engine_args(make.model(**sources)) if "lora" in it] == flags


def test_a_fixed_size_is_at_least_one_where_an_autoscaler_begins(make: Any) -> None:
    def replicas(**changes: Any) -> int:
        return deployment_of(make.model(**changes))["replicas"]

    scaling = {"min": 0, "max": 4, "scaleToZeroAfter": "1m"}
    assert (replicas(), replicas(replicas=3), replicas(pools=[{"name": "main", "scaling": scaling}])) == (1, 3, 1)
