"""Istio's gateway asks our picker: by the manifests of the tutorial, by the cluster's own gateways, and as the extension's own
conformance tests ask."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from rich.console import Console

from e2e import models
from e2e.cluster import crds
from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.cluster.phases import Phases
from e2e.neighbours import build
from e2e.neighbours.gaie import suite
from e2e.neighbours.istio import install as istio
from e2e.system import System
from e2e.traffic import openai_client
from e2e.waiting import eventually
from penstock.api import headers, labels

ISTIOS_OWN_FAILURE = "GatewayWeightedAcrossTwoInferencePools"
"""A route's rule with two pools: Istio asks the picker of the last one for all of the rule's requests. The test waits five
minutes for better answers, so it is left out."""
pytestmark = pytest.mark.usefixtures("charts")  # before all others: it may skip
EXPECTED = {
    "EppUnAvailableFailOpen",
    "GatewayDestinationEndpointServed",
    "GatewayFollowingEPPRouting",
    "GatewayFollowingEPPRoutingWithDataParallelism",
    "HTTPRouteInvalidInferencePoolRef",
    "HTTPRouteMultipleGatewaysDifferentPools",
    "HTTPRouteMultipleRulesDifferentPools",
    "InferencePoolAccepted",
    "InferencePoolAppProtocol",
    "InferencePoolHTTPRoutePortValidation",
    "InferencePoolInvalidEPPService",
    "InferencePoolMissingEPPRef",
    "InferencePoolResolvedRefsCondition",
}


@pytest.fixture(scope="session")
def charts() -> Path:
    """Istio's charts; taken before the tests are in a network without a way out."""
    if missing := build.missing():
        pytest.skip(f"not built: {', '.join(missing)} (.venv/bin/{build.COMMAND})")
    return istio.charts(Console(stderr=True))


@pytest.fixture(scope="module")
def gateway_class(charts: Path, cluster: Cluster, phases: Phases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Istio in the cluster, with the CRDs that it routes by."""
    cluster.run_for_images(istio.IMAGES | suite.IMAGES)
    with phases("Istio installed"):
        for source in (build.GATEWAY_API, crds.INFERENCE_POOLS):
            cluster.kubectl("apply", "--server-side", f"--filename={crds.place(cluster.programs, source)}")
        istio.install(cluster, charts, tmp_path_factory.mktemp("helm"))
    yield istio.GATEWAY_CLASS


def gateway(gateway_class: str) -> dict[str, Any]:
    metadata, listener = {"name": "my-gateway"}, {"name": "http", "port": 80, "protocol": "HTTP"}
    spec = {"gatewayClassName": gateway_class, "listeners": [listener]}
    return {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": metadata, "spec": spec}


def route(pool: str) -> dict[str, Any]:
    """The tutorial's."""
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool}
    rule = {"backendRefs": [backend], "timeouts": {"request": "0s"}}
    spec = {"parentRefs": [{"name": "my-gateway"}], "rules": [rule]}
    return {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": {"name": "llm"}, "spec": spec}


def server(name: str, served: str) -> dict[str, Any]:
    """A pod that nobody of ours made, selected by the tutorial's pool."""
    command = ["penstock", "serve", str(models.DEMO_MODEL), "--served-model-name", served, "--host", "$(POD_IP)"]
    container = {
        "name": "server",
        "image": "none",
        "command": command,
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8000}, "periodSeconds": 1, "failureThreshold": 300},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "vllm"}},
        "spec": {"containers": [container]},
    }


def asked(cluster: Cluster, namespace: str, model: str) -> str:
    """The UID of the pod that answered a completion by way of Istio's gateway."""
    address = cluster.get("service", "my-gateway-istio", namespace)["spec"]["clusterIP"]
    api = openai_client(f"http://{address}")
    try:
        raw = api.completions.with_raw_response.create(model=model, prompt="json.loads", max_tokens=2, temperature=0)
    except (openai.APIConnectionError, openai.APIStatusError) as error:
        raise AssertionError(str(error)) from error
    assert raw.parse().choices[0].text and raw.headers[headers.MODEL] == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        api.completions.create(model="no-such-model", prompt="a", max_tokens=1)
    return raw.headers[headers.REPLICA]


def expect_status(cluster: Cluster, model: str, status: int) -> None:
    address = cluster.get("service", "my-gateway-istio")["spec"]["clusterIP"]
    question = {"model": model, "prompt": "json.loads", "max_tokens": 2}
    answer = httpx.post(f"http://{address}/v1/completions", json=question, timeout=30)
    assert answer.status_code == status, answer.text
    assert headers.REPLICA not in answer.headers


def test_the_manifests_of_the_tutorial_serve_under_istio(cluster: Cluster, gateway_class: str, phases: Phases) -> None:
    folder = REPOSITORY / "manifests/inference-pool"
    cluster.kubectl("apply", "--server-side", f"--kustomize={folder}")
    try:
        rules = istio.picker_tls("default", "penstock-picker")
        cluster.apply(gateway(gateway_class), route("vllm"), server("one", "first"), *rules)
        with phases("a pod ready"):
            cluster.kubectl("wait", "--for=condition=Ready", "pod/one", "--timeout=300s", timeout=305)
        with phases("Istio → picker → pod"):
            answered = eventually(lambda: asked(cluster, "default", "first"))
        assert answered == cluster.get("pod", "one")["metadata"]["uid"]
        cluster.kubectl("scale", "deployment/penstock-picker", "--replicas=0")
        with phases("the picker gone → refused; failureMode FailOpen → served without it"):
            eventually(lambda: expect_status(cluster, "first", 500))
            change = '{"spec": {"endpointPickerRef": {"failureMode": "FailOpen"}}}'
            cluster.kubectl("patch", "inferencepool/vllm", "--type=merge", f"--patch={change}")
            eventually(lambda: expect_status(cluster, "first", 200))
    finally:
        cluster.kubectl("delete", "httproute/llm", "gateway/my-gateway", "pod/one", "--ignore-not-found", "--wait=false")
        cluster.kubectl("delete", f"--kustomize={folder}", "--ignore-not-found", "--wait=false")


def test_the_clusters_own_gateways_are_reached_by_the_service_that_the_operator_keeps(
    cluster: Cluster, gateway_class: str, system: System, namespace: str, phases: Phases
) -> None:
    reference = {"name": "picker", "port": {"number": 9002}}
    spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}], "endpointPickerRef": reference}
    pool = {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": "own"}, "spec": spec}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "picker", "labels": {labels.PICKER: "true"}},
        "spec": {"ports": [{"name": "grpc", "port": 9002}]},
    }
    cluster.apply(gateway(gateway_class), route("own"), pool, service, server("two", "second"), namespace=namespace)
    with phases("a pod ready"):
        cluster.kubectl("wait", "--for=condition=Ready", "pod/two", f"--namespace={namespace}", "--timeout=300s", timeout=305)
    with phases("Istio → penstock-gateway → pod"):
        answered = eventually(lambda: asked(cluster, namespace, "second"))
    assert answered == cluster.get("pod", "two", namespace)["metadata"]["uid"]


def test_the_extensions_own_conformance_tests_pass_with_our_picker(cluster: Cluster, gateway_class: str, phases: Phases) -> None:
    with suite.rights(cluster), phases("the extension's conformance tests"):
        cluster.kubectl("create", "namespace", suite.BACKENDS)
        cluster.apply(*istio.picker_tls(suite.BACKENDS, *suite.PICKERS), namespace=suite.BACKENDS)
        results = suite.judged(cluster, gateway_class, f"-skip-tests={ISTIOS_OWN_FAILURE}")
    for name, (result, seconds) in sorted(results.items()):
        print(f"{result}  {seconds:6.1f} s  {name}")
    assert {name for name, (result, _) in results.items() if result == "PASS"} == EXPECTED
