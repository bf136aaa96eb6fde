"""From an InferenceModel to its child objects."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.api.resources import InferenceModel, unsupported
from penstock.operator.desired import Rendering, Size, TemplateError, children, engine_args, pod_template, revision_of, size
from penstock.operator.overlay import OverlayError
from penstock.operator.restrictions import Allowances

RENDERING = Rendering(image="penstock/engine:test", system_namespace="ours")
ROLES = [{"name": "p", "role": "Prefill"}, {"name": "d", "role": "Decode"}]
TRANSFER = {"type": "transfer", "memory": "1Gi", "secretRef": {"name": "pairs"}}
PORTS = {"http": 8000, "admin": 8003, "events": 5557, "replay": 5558}


def by_kind(model: InferenceModel) -> dict[str, Any]:
    """A one-pool model's children."""
    return {item["kind"]: item for item in children(model, RENDERING)}


def test_a_model_becomes_a_deployment_a_headless_service_and_a_disruption_budget(make: Any) -> None:
    made = by_kind(make.model(replicas=2))
    assert set(made) == {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    owner = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "InferenceModel",
        "name": "tiny",
        "uid": "uid-tiny",
        "controller": True,
    }
    for item in made.values():
        assert (item["metadata"]["name"], item["metadata"]["namespace"]) == ("tiny-main", "default")
        assert item["metadata"]["ownerReferences"] == [owner]
        assert item["metadata"]["labels"]["penstock.dev/model"] == "tiny"
    selector = {"penstock.dev/model": "tiny", "penstock.dev/pool": "main"}
    workload, service = made["Deployment"], made["Service"]
    assert workload["spec"]["replicas"] == 2
    assert workload["spec"]["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    assert workload["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == selector
    assert service["spec"]["clusterIP"] == "None"
    assert made["PodDisruptionBudget"]["spec"] == {"maxUnavailable": 1, "selector": {"matchLabels": selector}}


@pytest.mark.req("DR-05")
def test_the_engine_container_is_as_the_contract_says(make: Any) -> None:
    template = by_kind(make.model())["Deployment"]["spec"]["template"]
    (engine,) = template["spec"]["containers"]
    assert (engine["name"], engine["image"], engine["command"]) == ("engine", "penstock/engine:test", ["penstock", "serve"])
    assert {port["name"]: port["containerPort"] for port in engine["ports"]} == PORTS
    assert engine["env"] == [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    paths = {name: engine[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 30 * 60, "a slow load must not end in a kill loop"
    within = {
        name: (engine[name]["periodSeconds"], engine[name]["failureThreshold"]) for name in ("readinessProbe", "livenessProbe")
    }
    assert within == {"readinessProbe": (2, 3), "livenessProbe": (10, 3)}, "6 s to lose traffic, 30 s to be restarted"
    assert template["spec"]["automountServiceAccountToken"] is False
    assert engine["terminationMessagePolicy"] == "FallbackToLogsOnError"


@pytest.mark.req("DR-05")
@pytest.mark.parametrize(
    ("image", "path"),
    [
        ("penstock/engine:0.1.0", "/live"),
        ("registry.example.com:5000/mirror/penstock/engine:1.0.2", "/live"),
        ("penstock/engine:0.0.9", "/health"),
        ("penstock/engine:latest", "/health"),
        ("penstock/engine:0.1.0-ours", "/health"),
        ("example.com/engine:2.0.0", "/health"),
        ("penstock/engine@sha256:" + "0" * 64, "/health"),
    ],
)
def test_liveness_is_probed_at_a_path_that_the_image_is_known_to_have(make: Any, image: str, path: str) -> None:
    named = children(make.model(engine={"image": image}), RENDERING)
    by_default = children(make.model(), Rendering(image=image))
    for made in (named, by_default):
        (workload,) = (it for it in made if it["kind"] == "Deployment")
        (engine,) = workload["spec"]["template"]["spec"]["containers"]
        assert engine["livenessProbe"]["httpGet"]["path"] == path


def test_an_engine_with_a_certificate_is_probed_over_tls(make: Any) -> None:
    def schemes(*arguments: str) -> set[str]:
        model = make.model(engine={"extraArgs": list(arguments)})
        (engine,) = by_kind(model)["Deployment"]["spec"]["template"]["spec"]["containers"]
        return {engine[name]["httpGet"]["scheme"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}

    assert schemes() == {"HTTP"}
    assert schemes("--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key") == {"HTTPS"}
    assert schemes("--ssl-certfile", "/tls/tls.crt", "--ssl-keyfile", "/tls/tls.key") == {"HTTPS"}


@pytest.mark.req("LD-01")
def test_a_load_format_reaches_the_engine_and_one_that_it_lacks_is_refused(make: Any) -> None:
    assert "--load-format=safetensors" in engine_args(make.model(source={"uri": "/m", "loadFormat": "safetensors"}))
    with pytest.raises(ValidationError, match="'auto' or 'safetensors'"):
        make.model(source={"uri": "/m", "loadFormat": "tensorizer"})


def _engine(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "engine", **fields}]}


def _secret(name: str) -> dict[str, Any]:
    return {"secretKeyRef": {"name": name, "key": "k"}}


@pytest.mark.parametrize(
    ("spec", "path", "flag"),
    [
        ({"volumes": [{"name": "v", "secret": {"secretName": "s"}}]}, "volumes[v].secret", "--template-secret s"),
        (
            {"volumes": [{"name": "v", "projected": {"sources": [{"configMap": {"name": "c"}}, {"secret": {"name": "s"}}]}}]},
            "volumes[v].projected.secret",
            "--template-secret s",
        ),
        (
            {"volumes": [{"name": "v", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "s"}}}]},
            "volumes[v].csi.nodePublishSecretRef",
            "--template-secret s",
        ),
        ({"volumes": [{"name": "v", "azureFile": {"secretName": "s"}}]}, "volumes[v].azureFile", "--template-secret s"),
        (_engine(env=[{"name": "E", "valueFrom": _secret("s")}]), "containers[engine].env[E]", "--template-secret s"),
        (_engine(envFrom=[{"secretRef": {"name": "s"}}]), "containers[engine].envFrom", "--template-secret s"),
        (
            {"initContainers": [{"name": "i", "image": "x", "env": [{"name": "E", "valueFrom": _secret("s")}]}]},
            "initContainers[i].env[E]",
            "--template-secret s",
        ),
        ({"nodeName": "node-1"}, "nodeName", "--allow-node-name-templates"),
        ({"priorityClassName": "system-node-critical"}, "priorityClassName", "--allow-system-priority-templates"),
        ({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser", "--allow-root-templates"),
        (
            _engine(securityContext={"runAsNonRoot": False}),
            "containers[engine].securityContext.runAsNonRoot",
            "--allow-root-templates",
        ),
        (_engine(command=["sh"]), "containers[engine].command", "--allow-command-templates"),
    ],
)
def test_what_a_new_template_asks_for_needs_the_flag_that_lists_it(make: Any, spec: Any, path: str, flag: str) -> None:
    model = make.model(pools=[{"name": "main", "template": {"spec": spec}}])
    with pytest.raises(TemplateError, match=re.escape(f"template.spec.{path}: not allowed in a template")) as refused:
        children(model, RENDERING)
    assert str(refused.value).endswith(f"start the operator with {flag}")
    every = Allowances(frozenset({"s"}), root=True, node_name=True, command=True, system_priority=True)
    one_less = {
        "--template-secret s": replace(every, secrets=frozenset({"other"})),
        "--allow-root-templates": replace(every, root=False),
        "--allow-node-name-templates": replace(every, node_name=False),
        "--allow-command-templates": replace(every, command=False),
        "--allow-system-priority-templates": replace(every, system_priority=False),
    }
    with pytest.raises(TemplateError):
        children(model, replace(RENDERING, allowances=one_less[flag]))
    assert children(model, replace(RENDERING, allowances=every))
    assert children(model, replace(RENDERING, allow_privileged_templates=True))


def test_drafts_are_asked_for_by_their_flags(make: Any) -> None:
    model = make.model(engine={"speculative": {"method": "suffix"}})
    assert {"--spec-method=suffix", "--spec-tokens=4"} <= set(engine_args(model))
    assert not any(it.startswith("--spec") for it in engine_args(make.model()))
    head = make.model(engine={"speculative": {"method": "eagle3", "model": "hf://org/head"}})
    assert {"--spec-method=eagle3", "--spec-model=hf://org/head"} <= set(engine_args(head))


def test_what_every_pod_may_ask_for_needs_no_flag(make: Any) -> None:
    harmless = {
        "priorityClassName": "serving",
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"runAsUser": 1000, "runAsNonRoot": True},
        "initContainers": [{"name": "i", "image": "x", "command": ["sh"]}],
    }
    assert children(make.model(pools=[{"name": "main", "template": {"spec": harmless}}]), RENDERING)


def test_every_honoured_field_reaches_the_engine(make: Any) -> None:
    limits = {
        "maxModelLen": 1024,
        "maxNumSeqs": 8,
        "maxBatchedTokens": 512,
        "longPrefillThreshold": 128,
        "blockSize": 32,
        "memoryPercent": 85,
        "imagesPerPrompt": 4,
        "imagePixels": 1003520,
    }
    quantization = {"weights": "int4_per_group_32", "kvCache": "bfloat16"}
    engine = {"dtype": "float32", "limits": limits, "extraArgs": ["--seed", "7"], "image": "mine:1", "quantization": quantization}
    served = {"name": "big", "aliases": ["b", "c"]}
    source = {"uri": "file:///m", "loadFormat": "safetensors"}
    model = make.model(engine=engine, served=served, source=source, drainTimeout="90s")
    assert engine_args(model) == [
        "file:///m", "--served-model-name", "big", "b", "c",
        "--host=$(POD_IP)", "--port=8000", "--admin-port=8003", "--events-port=5557", "--replay-port=5558",
        "--shutdown-timeout=90", "--load-format=safetensors", "--dtype=float32", "--quantization=int4_per_group_32",
        "--kv-cache-dtype=bfloat16", "--max-model-len=1024", "--max-num-seqs=8",
        "--max-num-batched-tokens=512", "--long-prefill-token-threshold=128", "--block-size=32",
        "--gpu-memory-utilization=0.85", '--limit-mm-per-prompt={"image": 4}', '--mm-processor-kwargs={"max_pixels": 1003520}',
        "--seed", "7",
    ]  # fmt: skip
    workload = by_kind(model)["Deployment"]
    assert workload["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"
    paused = by_kind(make.model(rollout={"paused": True, "progressDeadline": "5m"}))["Deployment"]["spec"]
    assert (paused["paused"], paused["progressDeadlineSeconds"]) == (True, 300)
    secret = {"uri": "hf://org/name", "secretRef": {"name": "hf"}}
    environment = by_kind(make.model(source=secret))["Deployment"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert environment[1] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "HF_TOKEN"}}}


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_on_cpus_are_processes_of_one_pod(make: Any, ranks: int) -> None:
    model = make.model(pools=[{"name": "cpu", "parallelism": {"tensor": ranks}}])
    (engine,) = by_kind(model)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert engine["resources"]["requests"] == {"cpu": str(ranks), "memory": "2Gi"}
    assert [it for it in engine["args"] if "parallel" in it] == ([] if ranks == 1 else [f"--tensor-parallel-size={ranks}"])
    assert "--device=cpu" in engine["args"] and "volumeMounts" not in engine


def test_the_stages_of_a_pipeline_on_cpus_are_processes_of_one_pod(make: Any) -> None:
    model = make.model(pools=[{"name": "cpu", "parallelism": {"tensor": 2, "pipeline": 3}}])
    assert unsupported(model.spec) == []
    (engine,) = by_kind(model)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert engine["resources"]["requests"]["cpu"] == "6"
    assert [it for it in engine["args"] if "parallel" in it] == ["--tensor-parallel-size=2", "--pipeline-parallel-size=3"]


@pytest.mark.req("DX-03")
def test_a_replica_on_several_nodes_is_a_group_of_pods_each_with_its_share(make: Any) -> None:
    """Consecutive ranks are in one pod; the engine finds its place in what LWS sets."""
    pool = {"name": "cpu", "parallelism": {"tensor": 2, "pipeline": 2, "nodes": 2}}
    model = make.model(pools=[pool])
    assert unsupported(model.spec) == []
    group = by_kind(model)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2 and group["restartPolicy"] == "RecreateGroupOnPodRestart"
    (leader,), (worker,) = (group[which]["spec"]["containers"] for which in ("leaderTemplate", "workerTemplate"))
    flags = ["--tensor-parallel-size=2", "--pipeline-parallel-size=2", "--nnodes=2"]
    assert [it for it in leader["args"] if it.partition("=")[0] in {flag.partition("=")[0] for flag in flags}] == flags
    assert worker["args"] == [*leader["args"], "--headless"] and "readinessProbe" in leader and "readinessProbe" not in worker
    assert leader["resources"]["requests"]["cpu"] == worker["resources"]["requests"]["cpu"] == "2"


@pytest.mark.req("DX-03", "DX-25")
def test_cores_on_several_nodes_are_whole_in_a_pod_each_behind_the_leaders_server(make: Any) -> None:
    """Experts may be divided among them all; but not among the pods of one core."""
    ranks = {"tensor": 2, "data": 6, "nodes": 3, "expert": {"enabled": True}}
    model = make.model(pools=[{"name": "cpu", "parallelism": ranks}])
    assert unsupported(model.spec) == []
    group = by_kind(model)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    (leader,), (worker,) = (group[which]["spec"]["containers"] for which in ("leaderTemplate", "workerTemplate"))
    flags = ["--tensor-parallel-size=2", "--data-parallel-size=6", "--data-parallel-size-local=2", "--enable-expert-parallel"]
    assert group["size"] == 3 and [it for it in leader["args"] if "parallel" in it or "nnodes" in it] == flags
    assert worker["args"] == [*leader["args"], "--headless"]
    assert leader["resources"]["requests"] == worker["resources"]["requests"] == {"cpu": "4", "memory": "4Gi"}
    assert {"name": "events-5", "containerPort": 5567, "protocol": "TCP"} in leader["ports"], "the leader has those of all cores"
    [refusal] = unsupported(make.model(pools=[{"name": "cpu", "parallelism": ranks | {"data": 1, "nodes": 2}}]).spec)
    assert "parallelism.expert.enabled (it does not go with a core on several nodes" in refusal


@pytest.mark.req("DX-08")
def test_nodes_that_cannot_be_are_refused_at_apply(make: Any) -> None:
    with pytest.raises(ValueError, match=r"parallelism: nodes must divide data, the cores of a replica, or tensor"):
        make.model(pools=[{"name": "cpu", "parallelism": {"tensor": 3, "nodes": 2}}])
    accelerated = {"name": "gpu", "parallelism": {"tensor": 2, "nodes": 2}, "accelerator": {"resource": "nvidia.com/gpu"}}
    with pytest.raises(ValueError, match=r"parallelism.nodes is for pools without devices: accelerator.perNode says"):
        make.model(pools=[accelerated])


@pytest.mark.req("PD-01")
def test_pairs_may_have_other_numbers_of_cores_nodes_and_ranks(make: Any) -> None:
    """The ranks of a node lend at the address of their pod, and workers of one role reach those of the other."""
    sizes = {"prefill": {"tensor": 4, "nodes": 2}, "decode": {"tensor": 2, "nodes": 2}, "more": {"data": 2}}
    roles = {"prefill": "Prefill", "decode": "Decode", "more": "Decode"}
    pools = [{"name": name, "role": roles[name], "parallelism": size} for name, size in sizes.items()]
    model = make.model(pools=pools, engine={"connector": TRANSFER})
    assert unsupported(model.spec) == []
    objects = children(model, RENDERING, extra={})
    groups = [it["spec"]["leaderWorkerTemplate"] for it in objects if it["kind"] == "LeaderWorkerSet"]
    pods = [group[which] for group in groups for which in ("leaderTemplate", "workerTemplate")]
    pods += [it["spec"]["template"] for it in objects if it["kind"] == "Deployment"]
    assert len(pods) == 5 and len({pod["metadata"]["annotations"]["penstock.dev/kv-layout"] for pod in pods}) == 1
    for pod in pods:
        (engine,) = pod["spec"]["containers"]
        assert any('"kv_ip": "$(POD_IP)"' in it for it in engine["args"]) and "POD_IP" in {it["name"] for it in engine["env"]}
        assert "kv-transfer" in {it["name"] for it in engine["volumeMounts"]} & {it["name"] for it in pod["spec"]["volumes"]}
    policies = {it["metadata"]["name"]: it["spec"]["ingress"][-1]["from"] for it in objects if it["kind"] == "NetworkPolicy"}
    readers = {"podSelector": {"matchLabels": {"penstock.dev/worker-of": "tiny-decode"}}}
    for name in ("tiny-prefill", "tiny-prefill-workers"):
        assert readers in policies[name]
    assert readers not in policies["tiny-more"]


def test_data_parallel_ranks_on_cpus_have_a_port_of_events_and_memory_each(make: Any) -> None:
    model = make.model(pools=[{"name": "cpu", "parallelism": {"tensor": 2, "data": 3}}])
    assert unsupported(model.spec) == []
    objects = by_kind(model)
    (engine,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert engine["resources"]["requests"] == {"cpu": "6", "memory": "6Gi"}
    assert [it for it in engine["args"] if "parallel" in it] == ["--tensor-parallel-size=2", "--data-parallel-size=3"]
    events = {"events": 5557, "replay": 5558, "events-1": 5559, "replay-1": 5560, "events-2": 5561, "replay-2": 5562}
    assert {it["name"]: it["containerPort"] for it in engine["ports"]} == {"http": 8000, "admin": 8003, **events}
    (of_pickers,) = (rule for rule in objects["NetworkPolicy"]["spec"]["ingress"] if "penstock-picker" in str(rule))
    assert [it["port"] for it in of_pickers["ports"]] == list(events.values())


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"data": 2}, None),
        ({"tensor": 2, "pipeline": 2}, None),
        (
            {"pipeline": 2, "data": 2},
            "parallelism.expert.enabled (it does not go with parallelism.pipeline and parallelism.data together)",
        ),
        ({"data": 2, "expert": {"enabled": True, "redundant": 2}}, None),
        ({"expert": {"enabled": True, "redundant": 2}}, "parallelism.expert.redundant (it needs tensor times data above 1)"),
        ({"expert": {"enabled": True, "eplb": {}}}, "parallelism.expert.eplb (it needs tensor times data above 1)"),
    ],
)
def test_experts_are_spread_over_the_processes_of_a_pod(make: Any, changes: Any, refused: str | None) -> None:
    model = make.model(pools=[{"name": "cpu", "parallelism": {"expert": {"enabled": True}, **changes}}])
    assert unsupported(model.spec) == ([] if refused is None else [f"spec.pools[cpu].{refused}"])
    if refused is None:
        (engine,) = by_kind(model)["Deployment"]["spec"]["template"]["spec"]["containers"]
        assert "--enable-expert-parallel" in engine["args"]
        copies = model.spec.pools[0].parallelism.expert.redundant
        moves = '--eplb-config={"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 2}'
        assert ("--enable-eplb" in engine["args"]) == (moves in engine["args"]) == (copies == 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {}},
        {"engine": {"connector": {"type": "offload", "memory": "1Gi"}}},
        {"engine": {"speculative": {"method": "mtp"}}},
        {"engine": {"speculative": {"method": "ngram"}}},
    ],
)
def test_what_stages_do_is_accepted_at_apply(make: Any, changes: Any) -> None:
    model = make.model(pools=[{"name": "cpu", "parallelism": {"pipeline": 2}}], **changes)
    assert unsupported(model.spec) == []


def test_stages_hand_pages_over_to_as_many_stages(make: Any) -> None:
    """Each of the ranks on a port of its own, which the model's own pods reach."""

    def pair(stages: int) -> Any:
        sizes = {"prefill": {"tensor": 2, "pipeline": 2}, "decode": {"tensor": 2, "pipeline": stages}}
        pools = [{"name": role, "role": role.title(), "parallelism": size} for role, size in sizes.items()]
        return make.model(pools=pools, engine={"connector": TRANSFER})

    assert unsupported(pair(2).spec) == []
    objects = children(pair(2), RENDERING, extra={})
    for deployment in (it for it in objects if it["kind"] == "Deployment"):
        (engine,) = deployment["spec"]["template"]["spec"]["containers"]
        assert [it for it in engine["args"] if "parallel" in it] == ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"]
        assert any(it.startswith("--kv-transfer-config=") for it in engine["args"])
    for policy in (it for it in objects if it["kind"] == "NetworkPolicy"):
        own = policy["spec"]["ingress"][-1]
        assert {"podSelector": {"matchLabels": {"penstock.dev/model": "tiny"}}} in own["from"]
        ranges = [range(it["port"], it["endPort"] + 1) for it in own["ports"] if it["protocol"] == "TCP"]
        assert all(any(port in ports for ports in ranges) for port in range(14579, 14583))
    refused = "parallelism.pipeline (no pool of the other role has the same, as pairs need)"
    assert unsupported(pair(1).spec) == [f"spec.pools[{name}].{refused}" for name in ("prefill", "decode")]


@pytest.mark.parametrize("drafts", [{"method": "ngram"}, {"method": "mtp"}, {"method": "eagle3", "model": "hf://org/head"}])
def test_drafts_of_every_method_go_with_devices(make: Any, drafts: dict[str, str]) -> None:
    pools = [{"name": "gpu", "accelerator": {"resource": "nvidia.com/gpu"}}]
    assert unsupported(make.model(engine={"speculative": drafts}, pools=pools).spec) == []


def test_an_accelerator_becomes_requests_and_limits(make: Any) -> None:
    def pod(**pool: Any) -> Any:
        accelerated = {"name": "main", "accelerator": {"resource": "nvidia.com/gpu"}, **pool}
        return by_kind(make.model(pools=[accelerated]))["Deployment"]["spec"]["template"]["spec"]

    (engine,) = pod()["containers"]
    gpu = {"nvidia.com/gpu": "1"}
    assert engine["resources"] == {"requests": {**gpu, "cpu": "2", "memory": "8Gi"}, "limits": gpu}
    assert "volumes" not in pod()
    memory = {
        "name": "main",
        "template": {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"memory": "9Gi"}}}]}},
    }
    several = pod(parallelism={"tensor": 4, "pipeline": 2}, **memory)
    (engine,) = several["containers"]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "9Gi"}
    assert engine["resources"]["requests"] == {"nvidia.com/gpu": "8", "cpu": "16"}, "a limit is a request, too"
    assert engine["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert several["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]


def pod_spec(make: Any, template_spec: Any) -> Any:
    """The pods' spec of a model without an accelerator, whose template has that spec."""
    model = make.model(pools=[{"name": "main", "template": {"spec": template_spec}}])
    return by_kind(model)["Deployment"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("resources", "requests"),
    [
        ({}, {"cpu": "1", "memory": "2Gi"}),
        ({"requests": {"memory": "32Gi"}}, {"cpu": "1", "memory": "32Gi"}),
        ({"limits": {"memory": "1Gi"}}, {"cpu": "1"}),
        ({"requests": {"cpu": "4", "memory": "1Gi"}, "limits": {"cpu": "4"}}, {"cpu": "4", "memory": "1Gi"}),
    ],
)
def test_an_engine_requests_cpu_and_memory_unless_its_template_names_them(make: Any, resources: Any, requests: Any) -> None:
    template = {"containers": [{"name": "engine", "resources": resources}, {"name": "sidecar"}]}
    engine, sidecar = pod_spec(make, template)["containers"]
    assert engine["resources"] == {**resources, "requests": requests}
    assert "resources" not in sidecar


def test_no_requests_are_added_to_a_pod_that_has_its_own(make: Any) -> None:
    (engine,) = pod_spec(make, {"resources": {"requests": {"cpu": "8", "memory": "64Gi"}}})["containers"]
    assert "resources" not in engine


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ({}, ["--device=cpu"]),
        ({"containers": [{"name": "engine", "resources": {"limits": {"cpu": "4", "hugepages-2Mi": "1Gi"}}}]}, ["--device=cpu"]),
        ({"containers": [{"name": "engine", "resources": {"limits": {"amd.com/gpu": 1}}}]}, []),
        ({"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}, []),
        ({"runtimeClassName": "nvidia"}, []),
    ],
)
def test_an_engine_that_asks_for_no_device_uses_none(make: Any, template: Any, told: list[str]) -> None:
    (engine,) = pod_spec(make, template)["containers"]
    assert [it for it in engine["args"] if it.startswith("--device")] == told


def test_an_engine_with_an_accelerator_chooses_its_device(make: Any) -> None:
    model = make.model(pools=[{"name": "main", "accelerator": {"resource": "nvidia.com/gpu"}}])
    (engine,) = by_kind(model)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert not [it for it in engine["args"] if it.startswith("--device")]


@given(st.data())
def test_what_a_field_renders_cannot_be_said_again(data: st.DataObject) -> None:
    limits = dict.fromkeys(
        ("maxModelLen", "maxNumSeqs", "maxBatchedTokens", "longPrefillThreshold", "blockSize", "memoryPercent"), 9
    ) | {"imagesPerPrompt": 9, "imagePixels": 9999}
    spec = {
        "served": {"name": "m"},
        "source": {"uri": "/m"},
        "pools": [{"name": "main"}],
        "engine": {"dtype": "float32", "limits": limits},
    }
    resource = {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": {"name": "m"}, "spec": spec}
    rendered = [argument for argument in engine_args(InferenceModel.parse(resource)) if argument.startswith("--")]
    flag = data.draw(st.sampled_from(rendered)).partition("=")[0]
    spec["engine"]["extraArgs"] = data.draw(st.sampled_from([[flag, "1"], [f"{flag}=1"]]))
    with pytest.raises(ValueError, match="extraArgs may not set"):
        InferenceModel.parse(resource)


@pytest.mark.req("DR-08")
@given(st.integers(0, 86_400))
def test_the_kubelet_waits_longer_than_the_drain(drain: int) -> None:
    spec = {
        "served": {"name": "m"},
        "source": {"uri": "/m"},
        "pools": [{"name": "main"}],
        "drainTimeout": f"{drain}s",
    }
    resource = {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": {"name": "m"}, "spec": spec}
    model = InferenceModel.parse(resource)
    pod = by_kind(model)["Deployment"]["spec"]["template"]["spec"]
    assert f"--shutdown-timeout={drain}" in pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] > drain


def test_replicas_wait_half_a_minute_for_a_lost_node(make: Any) -> None:
    def tolerations(*own: Any) -> Any:
        overlay = {"spec": {"tolerations": list(own)}} if own else {}
        pool = {"name": "main", "template": overlay}
        return by_kind(make.model(pools=[pool]))["Deployment"]["spec"]["template"]["spec"]["tolerations"]

    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    not_ready, unreachable = ({"key": f"node.kubernetes.io/{state}", **lost} for state in ("not-ready", "unreachable"))
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    patient = {**unreachable, "tolerationSeconds": 900}
    stubborn = {"operator": "Exists"}
    assert tolerations() == [not_ready, unreachable]
    assert tolerations(gpu) == [gpu, not_ready, unreachable]
    assert tolerations(patient) == [patient, not_ready]
    assert tolerations(stubborn) == [stubborn]
    with pytest.raises(OverlayError, match=r"pools\[main\]\.template\.spec\.tolerations must be a list"):
        children(make.model(pools=[{"name": "main", "template": {"spec": {"tolerations": "all"}}}]), RENDERING)


def test_who_decides_the_size(make: Any) -> None:
    def of(**changes: Any) -> Size:
        model = make.model(**changes)
        return size(model, model.spec.pools[0])

    assert of(replicas=0) == Size(0, "spec")
    assert of() == Size(1, "others")
    assert of(pools=[{"name": "main", "scaling": {"min": 2, "max": 4}}]) == Size(2, "autoscaler")
    assert of(pools=[{"name": "main", "scaling": {"min": 0, "max": 4, "scaleToZeroAfter": "1m"}}]) == Size(1, "autoscaler")


@pytest.mark.parametrize(("replicas", "budget"), [(0, False), (1, False), (2, True)])
def test_a_single_replica_has_no_disruption_budget(make: Any, replicas: int, budget: bool) -> None:
    assert ("PodDisruptionBudget" in by_kind(make.model(replicas=replicas))) is budget


def test_the_workers_of_replicas_that_span_nodes_are_guarded_too(make: Any) -> None:
    """A group that loses a worker is down, and a worker takes orders from whoever reaches it."""
    spanning = {
        "name": "main",
        "parallelism": {"tensor": 8, "pipeline": 2},
        "accelerator": {"resource": "nvidia.com/gpu", "perNode": 8},
    }
    made = children(make.model(pools=[{**spanning, "scaling": {"min": 2, "max": 4}}]), RENDERING)
    by_name = {(item["kind"], item["metadata"]["name"]): item["spec"] for item in made}
    group = by_name["LeaderWorkerSet", "tiny-main"]["leaderWorkerTemplate"]
    budget = by_name["PodDisruptionBudget", "tiny-main"]
    assert budget["selector"] == {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": "tiny-main"}}, "LWS labels all of its pods"
    policy = by_name["NetworkPolicy", "tiny-main-workers"]
    chosen = policy["podSelector"]["matchLabels"].items()
    assert chosen <= group["workerTemplate"]["metadata"]["labels"].items()
    assert not chosen <= group["leaderTemplate"]["metadata"]["labels"].items()
    peers = [{"penstock.dev/model": "tiny"}, {"penstock.dev/worker-of": "tiny-main"}]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}} for labels in peers]}]
    assert ("NetworkPolicy", "tiny-main-workers") not in {
        (item["kind"], item["metadata"]["name"]) for item in children(make.model(replicas=2), RENDERING)
    }


def test_what_a_cluster_wants_of_pods_is_said_in_the_template(make: Any) -> None:
    """Where pods may go, who is displaced for them, who may pull their image, and devices by claim (DRA) in place of a count."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"penstock.dev/model": "tiny"}},
    }
    wanted = {
        "topologySpreadConstraints": [spread],
        "priorityClassName": "serving",
        "imagePullSecrets": [{"name": "registry"}],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    }
    engine = {"name": "engine", "resources": {"claims": [{"name": "gpu"}]}}
    spec = by_kind(make.model(pools=[{"name": "main", "template": {"spec": {**wanted, "containers": [engine]}}}]))["Deployment"][
        "spec"
    ]["template"]["spec"]
    assert {field: spec[field] for field in wanted} == wanted
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    assert spec["containers"][0]["args"], "it is the generated container that has the claim"


def test_the_template_is_laid_over_and_its_privileges_refused(make: Any) -> None:
    overlay = {"spec": {"nodeSelector": {"a": "b"}, "containers": [{"name": "engine", "env": [{"name": "X", "value": "1"}]}]}}
    template = by_kind(make.model(pools=[{"name": "main", "template": overlay}]))["Deployment"]["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"a": "b"}
    assert [entry["name"] for entry in template["spec"]["containers"][0]["env"]] == ["POD_IP", "X"]
    hostile = make.model(pools=[{"name": "main", "template": {"spec": {"hostNetwork": True}}}])
    with pytest.raises(TemplateError, match=r"pools\[main\]: template\.spec\.hostNetwork: not allowed"):
        children(hostile, RENDERING)
    assert children(hostile, Rendering(image="x", allow_privileged_templates=True))
    stolen = make.model(pools=[{"name": "main", "template": {"metadata": {"labels": {"penstock.dev/model": "other"}}}}])
    with pytest.raises(TemplateError, match="Penstock or Kubernetes sets this"):
        children(stolen, Rendering(image="x", allow_privileged_templates=True))
    deaf = make.model(pools=[{"name": "main", "template": {"spec": {"containers": [{"name": "engine", "args": ["/other"]}]}}}])
    with pytest.raises(TemplateError, match=r"containers\[engine\]\.args \(use engine\.extraArgs\): Penstock or"):
        children(deaf, RENDERING)


@pytest.mark.req("XC-04")
def test_the_revision_changes_with_what_a_replica_runs_and_with_nothing_else(make: Any) -> None:
    def revision(**changes: Any) -> str:
        return revision_of(by_kind(make.model(**changes))["Deployment"])

    base = revision()
    same: list[dict[str, Any]] = [
        {"replicas": 3},
        {"routing": {"policy": "Random"}},
        {"rollout": {"paused": True}},
        {"pools": [{"name": "main", "scaling": {"max": 3}}]},
    ]
    other: list[dict[str, Any]] = [
        {"source": {"uri": "/other"}},
        {"engine": {"dtype": "float32"}},
        {"engine": {"image": "x"}},
        {"served": {"name": "y"}},
        {"drainTimeout": "1s"},
        {"pools": [{"name": "main", "template": {"spec": {"nodeSelector": {"a": "b"}}}}]},
    ]
    assert {revision(**changes) for changes in same} == {base}
    revisions = [base, *(revision(**changes) for changes in other)]
    assert len(set(revisions)) == len(revisions)


def test_a_workload_has_the_metadata_that_other_controllers_ask_for(make: Any) -> None:
    own = {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}, "annotations": {"example.com/topology": "rack"}}
    made = by_kind(make.model(pools=[{"name": "main", "metadata": own}]))
    meta, plain = made["Deployment"]["metadata"], by_kind(make.model())["Deployment"]["metadata"]
    assert meta == {**plain, "labels": plain["labels"] | own["labels"], "annotations": own["annotations"]}
    assert own["labels"].items() <= meta["labels"].items()
    assert "kueue.x-k8s.io/queue-name" not in made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for name in ("penstock.dev/applied", "deployment.kubernetes.io/revision"):
        with pytest.raises(TemplateError, match=re.escape(f"pools[main]: metadata.annotations[{name}]: Penstock or Kubernetes")):
            by_kind(make.model(pools=[{"name": "main", "metadata": {"annotations": {name: "x"}}}]))


def ingress(model: InferenceModel) -> list[Any]:
    return by_kind(model)["NetworkPolicy"]["spec"]["ingress"]


def opens(rule: Any, number: int, protocol: str = "TCP") -> bool:
    """As Kubernetes reads a rule: no ports are all ports."""
    ranges = [(it["port"], it.get("endPort", it["port"])) for it in rule.get("ports") or [] if it["protocol"] == protocol]
    return not rule.get("ports") or any(first <= number <= last for first, last in ranges)


def test_only_pickers_hear_a_replicas_events_and_only_the_operator_changes_it(make: Any) -> None:
    sidecar = {"name": "exporter", "image": "x", "ports": [{"containerPort": 9400}]}
    native = {
        "name": "proxy",
        "restartPolicy": "Always",
        "ports": [{"containerPort": 9500}, {"containerPort": 53, "protocol": "UDP"}],
    }
    passing = {"name": "copy", "ports": [{"containerPort": 9600}]}
    template = {"spec": {"containers": [sidecar], "initContainers": [native, passing]}}
    anybody, pickers, operator, siblings = ingress(make.model(pools=[{"name": "main", "template": template}]))
    assert "from" not in anybody
    assert [(it["port"], it["protocol"]) for it in anybody["ports"]] == [(8000, "TCP"), (9400, "TCP"), (9500, "TCP"), (53, "UDP")]
    assert [it["port"] for it in pickers["ports"]] == [5557, 5558]
    its = {"key": "app.kubernetes.io/name", "operator": "In", "values": ["penstock-gateway", "penstock-picker"]}
    picker = {"podSelector": {"matchExpressions": [its]}}
    ours = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ours"}}}
    assert pickers["from"] == [picker, {**ours, **picker}], "another tenant's pod may have any label"
    assert [it["port"] for it in operator["ports"]] == [8003]
    assert operator["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ours"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "penstock-operator"}},
        }
    ]
    assert [it["podSelector"]["matchLabels"] for it in siblings["from"]] == [
        {"penstock.dev/model": "tiny"},
        {"penstock.dev/worker-of": "tiny-main"},  # a leader's workers are no replicas
    ]
    assert opens(siblings, 8000) and opens(siblings, 29_500) and opens(siblings, 8003, "UDP") and not opens(siblings, 8003)


@given(st.dictionaries(st.sampled_from(sorted(PORTS.values())), st.sampled_from(["http", "events", "admin", "x"])))
def test_other_names_for_ports_open_nothing(names: dict[int, str]) -> None:
    ports = [{"containerPort": number, "name": name} for number, name in names.items()]
    pool = {"name": "main", "template": {"spec": {"containers": [{"name": "engine", "ports": ports}]}}}
    spec = {"served": {"name": "m"}, "source": {"uri": "/m"}, "pools": [pool]}
    resource = {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": {"name": "m"}, "spec": spec}
    rules = ingress(InferenceModel.parse(resource))
    assert all(rule["ports"] for rule in rules)
    to_all = [rule for rule in rules if "from" not in rule]
    assert {number for number in (*PORTS.values(), 22) if any(opens(rule, number) for rule in to_all)} == {8000}


def test_a_revision_without_an_administrative_port_has_no_rule_for_one(make: Any) -> None:
    model = make.model()
    (engine,) = (template := pod_template(model, model.spec.pools[0], RENDERING))["spec"]["containers"]
    engine["ports"] = [port for port in engine["ports"] if port["name"] != "admin"]
    (policy,) = [it for it in children(model, RENDERING, {"main": template}) if it["kind"] == "NetworkPolicy"]
    assert [[it["port"] for it in rule["ports"]] for rule in policy["spec"]["ingress"]][:2] == [[8000], [5557, 5558]]
    assert len(policy["spec"]["ingress"]) == 3


def test_a_prometheus_finds_the_monitors_that_are_asked_for(make: Any) -> None:
    rendering = Rendering(image="x", monitor_labels={"release": "prometheus"})
    (monitor,) = [it for it in children(make.model(), rendering) if it["kind"] == "PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"] == {"matchLabels": {"penstock.dev/model": "tiny"}}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (pool,) = [it["sourceLabels"] for it in endpoint["relabelings"] if it["targetLabel"] == "pool"]
    assert pool == ["__meta_kubernetes_pod_label_penstock_dev_pool"]
    assert endpoint["interval"] == "5s"
    assert "PodMonitor" not in by_kind(make.model())


def test_replicas_of_both_roles_share_a_secret_and_lend_kv_pages(make: Any) -> None:
    connector = {"type": "transfer", "memory": "2Gi", "secretRef": {"name": "pairs"}}
    pools = [{"name": "pre", "role": "Prefill"}, {"name": "dec", "role": "Decode"}]
    model = make.model(engine={"connector": connector}, pools=pools)
    assert unsupported(model.spec) == []
    pods = {
        it["metadata"]["name"].rpartition("-")[2]: it["spec"]["template"]["spec"]
        for it in children(model, RENDERING, extra={})
        if it["kind"] == "Deployment"
    }
    for name, role in (("pre", "kv_producer"), ("dec", "kv_consumer")):
        (engine,) = pods[name]["containers"]
        flags = [it for it in engine["args"] if it.startswith("--kv-")]
        assert flags == [
            "--kv-offload-memory-bytes=2147483648",
            f'--kv-transfer-config={{"kv_connector": "transfer", "kv_role": "{role}", "kv_ip": "$(POD_IP)"}}',
            "--kv-transfer-secret-file=/etc/penstock/kv-transfer/secret",
        ]
        assert engine["volumeMounts"] == [{"name": "kv-transfer", "mountPath": "/etc/penstock/kv-transfer", "readOnly": True}]
        items = [{"key": "secret", "path": "secret"}]
        assert pods[name]["volumes"] == [{"name": "kv-transfer", "secret": {"secretName": "pairs", "items": items}}]
    # The pages' port is open to the model's own pods alone, as is every port that is not declared.
    assert 14579 not in [port["containerPort"] for port in engine["ports"]]


@pytest.mark.req("PD-29")
def test_the_pools_of_a_pair_have_machines_of_their_own(make: Any) -> None:
    def template(kind: str, memory: str) -> dict[str, Any]:
        engine = {"name": "engine", "resources": {"limits": {"memory": memory}}}
        return {"spec": {"nodeSelector": {"kind": kind}, "containers": [engine]}}

    pools = [
        {"name": "pre", "role": "Prefill", "template": template("large", "64Gi")},
        {"name": "dec", "role": "Decode", "template": template("small", "16Gi")},
    ]
    found = children(make.model(engine={"connector": TRANSFER}, pools=pools), RENDERING, extra={})
    pods = [it["spec"]["template"]["spec"] for it in found if it["kind"] == "Deployment"]
    assert [pod["nodeSelector"]["kind"] for pod in pods] == ["large", "small"]
    assert [pod["containers"][0]["resources"]["limits"]["memory"] for pod in pods] == ["64Gi", "16Gi"]


def test_a_pool_that_fits_no_pool_of_the_other_role_is_refused(make: Any) -> None:
    def refused(*tensors: int, drafts: str = "mtp") -> list[str]:
        names = [("p", "Prefill"), ("d", "Decode"), ("e", "Decode")]
        pools = [{"name": n, "role": role, "parallelism": {"tensor": t}} for (n, role), t in zip(names, tensors, strict=False)]
        engine = {"connector": TRANSFER, "speculative": {"method": drafts}}
        return unsupported(make.model(engine=engine, pools=pools).spec)

    assert refused(2, 2) == refused(2, 2, 2) == []
    assert refused(4, 4, 2) == ["spec.pools[e].parallelism.tensor (no pool of the other role has the same, as pairs need)"]
    assert [it.partition(" ")[0] for it in refused(4, 1)] == [f"spec.pools[{name}].parallelism.tensor" for name in "pd"]
    assert refused(4, 1, drafts="suffix") == [], "heads are put together, and these drafts have no pages"


@pytest.mark.parametrize(("claim", "volume"), [(None, {"emptyDir": {}}), ("kv", {"persistentVolumeClaim": {"claimName": "kv"}})])
def test_kv_pages_have_a_disk_and_an_object_store_with_its_credentials(make: Any, claim: str | None, volume: Any) -> None:
    disk = {"size": "2Gi", **({} if claim is None else {"claimName": claim})}
    bucket = {"uri": "s3://b/kv", "size": "1Ti", "secretRef": {"name": "aws"}}
    store = {"uri": "mooncake://master:50051", "size": "3Gi"}
    connector = {"type": "offload", "memory": "1Gi", "disk": disk, "store": store, "bucket": bucket}
    model = make.model(engine={"connector": connector})
    (pod,) = [it["spec"]["template"]["spec"] for it in children(model, RENDERING, extra={}) if it["kind"] == "Deployment"]
    (engine,) = pod["containers"]
    assert [it for it in engine["args"] if it.startswith("--kv-")] == [
        "--kv-offload-memory-bytes=1073741824",
        "--kv-offload-disk-bytes=2147483648",
        "--kv-offload-store=mooncake://master:50051",
        "--kv-offload-store-bytes=3221225472",
        "--kv-offload-bucket=s3://b/kv",
        "--kv-offload-bucket-bytes=1099511627776",
        "--kv-offload-directory=/var/cache/penstock/kv",
    ]
    assert {"name": "kv-pages", "mountPath": "/var/cache/penstock/kv"} in engine["volumeMounts"]
    assert {"name": "kv-pages", **volume} in pod["volumes"]
    (key,) = [it["valueFrom"]["secretKeyRef"] for it in engine["env"] if it["name"] == "AWS_ACCESS_KEY_ID"]
    assert key == {"name": "aws", "key": "AWS_ACCESS_KEY_ID"}


@pytest.mark.parametrize(
    ("engine", "pools", "refused"),
    [
        ({"type": "offload", "memory": "1Gi"}, [{"name": "a"}], []),
        (
            {"type": "offload", "memory": "1Gi"},
            ROLES,
            ["spec.pools[p].role (Prefill; it needs", "spec.pools[d].role (Decode; it"],
        ),
        (TRANSFER, [{"name": "a"}], ["spec.engine.connector.type (transfer is for pools of the roles Prefill and Decode)"]),
        (
            TRANSFER,
            [ROLES[0], {**ROLES[1], "accelerator": {"resource": "nvidia.com/gpu"}}],
            ["spec.engine.connector.type (pool d has devices; transfer works on CPUs alone)"],
        ),
        ({"type": "nixl"}, [{"name": "a"}], ["spec.engine.connector.type (nixl; none, offload, transfer work)"]),
    ],
)
def test_what_no_connector_does_is_refused_by_name(make: Any, engine: Any, pools: Any, refused: list[str]) -> None:
    found = unsupported(make.model(engine={"connector": engine}, pools=pools).spec)
    assert len(found) == len(refused) and all(it.startswith(words) for it, words in zip(found, refused, strict=True))


def test_pairs_do_not_go_with_tls(make: Any) -> None:
    engine = {"connector": TRANSFER, "extraArgs": ["--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key"]}
    assert unsupported(make.model(engine=engine, pools=ROLES).spec) == [
        "spec.engine.connector.type (transfer does not go with --ssl-certfile)"
    ]
