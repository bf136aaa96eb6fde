"""From an InferenceModel to its child objects."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.resources import InferenceModel
from penstock.operator.desired import Rendering, Size, TemplateError, children, engine_args, revision_of, size

RENDERING = Rendering(image="penstock/engine:test")


def by_kind(model: InferenceModel) -> dict[str, Any]:
    """A one-pool model's children."""
    return {item["kind"]: item for item in children(model, RENDERING)}


def test_a_model_becomes_a_deployment_a_headless_service_and_a_disruption_budget(make: Any) -> None:
    made = by_kind(make.model(replicas=2))
    assert set(made) == {"Deployment", "Service", "PodDisruptionBudget"}
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
    assert {port["name"]: port["containerPort"] for port in engine["ports"]} == {"http": 8000, "events": 5557, "replay": 5558}
    assert engine["env"] == [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    paths = {name: engine[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 30 * 60, "a slow load must not end in a kill loop"
    assert template["spec"]["automountServiceAccountToken"] is False
    assert engine["terminationMessagePolicy"] == "FallbackToLogsOnError"


@pytest.mark.req("XC-04")
def test_every_honoured_field_reaches_the_engine(make: Any) -> None:
    limits = {
        "maxModelLen": 1024,
        "maxNumSeqs": 8,
        "maxBatchedTokens": 512,
        "longPrefillThreshold": 128,
        "blockSize": 32,
        "memoryPercent": 85,
    }
    engine = {"dtype": "float32", "limits": limits, "extraArgs": ["--seed", "7"], "image": "mine:1"}
    served = {"name": "big", "aliases": ["b", "c"]}
    model = make.model(engine=engine, served=served, source={"uri": "file:///m"}, drainTimeout="90s")
    assert engine_args(model) == [
        "file:///m", "--served-model-name", "big", "b", "c",
        "--host=$(POD_IP)", "--port=8000", "--events-port=5557", "--replay-port=5558", "--shutdown-timeout=90",
        "--dtype=float32", "--max-model-len=1024", "--max-num-seqs=8", "--max-num-batched-tokens=512",
        "--long-prefill-token-threshold=128", "--block-size=32", "--gpu-memory-utilization=0.85", "--seed", "7",
    ]  # fmt: skip
    workload = by_kind(model)["Deployment"]
    assert workload["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"
    paused = by_kind(make.model(rollout={"paused": True, "progressDeadline": "5m"}))["Deployment"]["spec"]
    assert (paused["paused"], paused["progressDeadlineSeconds"]) == (True, 300)
    secret = {"uri": "hf://org/name", "secretRef": {"name": "hf"}}
    environment = by_kind(make.model(source=secret))["Deployment"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert environment[1] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "HF_TOKEN"}}}


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
    with pytest.raises(TemplateError, match="Penstock sets this"):
        children(stolen, Rendering(image="x", allow_privileged_templates=True))


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
