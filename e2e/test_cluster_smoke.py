"""The testbed itself: what the other tests rely on, each shown once."""

import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from e2e.cluster import network
from e2e.cluster.build import kubernetes_version
from e2e.cluster.cluster import Cluster, running
from e2e.cluster.commands import CommandError
from e2e.cluster.phases import Phases
from e2e.waiting import eventually

SERVE = 'cd /www && echo "I am $(hostname)" >index.html && exec python3 -m http.server 8000'
LIST_PODS = """
import os, ssl, urllib.error, urllib.request

secrets = "/var/run/secrets/kubernetes.io/serviceaccount"
read = lambda name: open(f"{secrets}/{name}").read()
server = "https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}".format_map(os.environ)
url = f"{server}/api/v1/namespaces/{read('namespace')}/pods"
request = urllib.request.Request(url, headers={"Authorization": f"Bearer {read('token')}"})
try:
    urllib.request.urlopen(request, context=ssl.create_default_context(cafile=f"{secrets}/ca.crt"))
    raise SystemExit("the default account may list pods")
except urllib.error.HTTPError as refusal:
    assert refusal.code == 403 and "system:serviceaccount" in refusal.read().decode()
"""
READY = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}


def container(*command: str, **more: Any) -> dict[str, Any]:
    return {"name": "main", "image": "none", "imagePullPolicy": "IfNotPresent", "command": list(command), **more}


def pod(name: str, main: dict[str, Any], **spec: Any) -> dict[str, Any]:
    spec = {"terminationGracePeriodSeconds": 1, "containers": [main], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def web_deployment(replicas: int) -> dict[str, Any]:
    port = {"name": "http", "containerPort": 8000, "protocol": "TCP"}
    main = container("sh", "-c", SERVE, ports=[port], readinessProbe=READY, volumeMounts=[{"name": "www", "mountPath": "/www"}])
    template = {
        "metadata": {"labels": {"app": "web"}},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [main], "volumes": [{"name": "www", "emptyDir": {}}]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}


def web_service(name: str, **spec: Any) -> dict[str, Any]:
    port = {"name": "http", "port": 8000, "targetPort": "http", "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": "web"}, "ports": [port], **spec},
    }


def ready_addresses(cluster: Cluster, namespace: str, service: str) -> set[str]:
    slices = cluster.list("endpointslices", namespace, f"kubernetes.io/service-name={service}")
    endpoints = [endpoint for part in slices for endpoint in part.get("endpoints") or []]
    return {endpoint["addresses"][0] for endpoint in endpoints if endpoint["conditions"]["ready"]}


def main_status(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    statuses = cluster.get("pod", name, namespace)["status"].get("containerStatuses")
    assert statuses, f"{name} has not been taken up yet"
    return statuses[0]


def expect_success(cluster: Cluster, namespace: str, name: str) -> None:
    done = "--for=jsonpath={.status.phase}=Succeeded"
    cluster.kubectl("wait", done, f"pod/{name}", f"--namespace={namespace}", "--timeout=120s")


def process_of(status: dict[str, Any]) -> int:
    return int(status["containerID"].removeprefix("process://"))


def test_control_plane_and_nodes(cluster: Cluster) -> None:
    assert f"Server Version: {kubernetes_version()}" in cluster.kubectl("version")
    capacities = {node["metadata"]["name"]: node["status"]["capacity"] for node in cluster.list("nodes")}
    assert capacities.keys() == {"node-1", "node-2"}
    assert capacities["node-1"]["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in capacities["node-2"]


def test_deployment_serves_scales_and_goes(cluster: Cluster, namespace: str) -> None:
    cluster.apply(web_deployment(2), web_service("web", clusterIP="None"), web_service("web-ip"), namespace=namespace)
    cluster.kubectl("wait", "--for=condition=Available", "deployment/web", f"--namespace={namespace}", "--timeout=120s")

    def listed(count: int) -> set[str]:
        addresses = ready_addresses(cluster, namespace, "web")
        assert len(addresses) == count
        return addresses

    answers = {httpx.get(f"http://{address}:8000/").text for address in eventually(lambda: listed(2))}
    assert answers == {f"I am {pod['metadata']['name']}\n" for pod in cluster.list("pods", namespace)}

    cluster_ip = cluster.get("service", "web-ip", namespace)["spec"]["clusterIP"]
    assert eventually(lambda: get_text(f"http://{cluster_ip}:8000/")) in answers

    urls = [f"http://{host}:8000/" for host in ("web", "web-ip", f"web.{namespace}.svc", f"web-ip.{namespace}.svc.cluster.local")]
    fetch = f"import urllib.request\nfor url in {urls}: assert urllib.request.urlopen(url).read().startswith(b'I am web-')"
    cluster.apply(pod("asks", container("python3", "-c", fetch), restartPolicy="Never"), namespace=namespace)
    expect_success(cluster, namespace, "asks")
    cluster.kubectl("delete", "pod/asks", f"--namespace={namespace}")

    cluster.kubectl("scale", "deployment/web", "--replicas=3", f"--namespace={namespace}")
    eventually(lambda: listed(3))
    uids = {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}
    cluster.kubectl("delete", "deployment/web", f"--namespace={namespace}")

    def nothing_left() -> None:
        assert not cluster.list("pods", namespace)
        assert not ready_addresses(cluster, namespace, "web")
        assert not {uid[:12] for uid in uids}.intersection(
            name.rpartition("@")[2] for name in network.namespaces(f"{cluster.name}@")
        )

    eventually(nothing_left)


def get_text(url: str) -> str:
    try:
        return httpx.get(url, timeout=2).text
    except httpx.TransportError as problem:
        raise AssertionError(f"{url}: {problem!r}") from problem


def test_process_that_dies_is_started_again(cluster: Cluster, namespace: str) -> None:
    main = container("sh", "-c", "sleep 1; echo it hurts; exit 3", terminationMessagePolicy="FallbackToLogsOnError")
    cluster.apply(pod("mortal", main), namespace=namespace)

    def backs_off() -> None:
        status = main_status(cluster, namespace, "mortal")
        assert status["restartCount"] >= 1
        assert status["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff"
        ended = status["lastState"]["terminated"]
        assert (ended["exitCode"], ended["message"]) == (3, "it hurts\n")

    eventually(backs_off)


def test_failed_liveness_restarts_and_failed_readiness_does_not(cluster: Cluster, namespace: str) -> None:
    # Each file is made once, in the first process's own root: the second process finds neither.
    start = "touch /tmp/alive-$POD /tmp/ready-$POD; exec sleep 600"
    probe = {"periodSeconds": 1, "failureThreshold": 1}
    main = container(
        "sh",
        "-c",
        start,
        env=[{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}],
        livenessProbe=probe | {"exec": {"command": ["sh", "-c", "test -e /tmp/alive-$POD"]}, "initialDelaySeconds": 1},
        readinessProbe=probe | {"exec": {"command": ["sh", "-c", "test -e /tmp/ready-$POD"]}},
    )
    cluster.apply(pod("probed", main), namespace=namespace)

    def ready(expected: bool, restarts: int) -> int:
        status = main_status(cluster, namespace, "probed")
        assert (status["ready"], status["restartCount"]) == (expected, restarts)
        return process_of(status)

    first = eventually(lambda: ready(True, 0))
    uid = cluster.get("pod", "probed", namespace)["metadata"]["uid"]
    folder = Path("/proc", str(first), "root", "tmp")  # as the container sees it
    (folder / f"ready-{uid}").unlink()
    assert eventually(lambda: ready(False, 0)) == first
    (folder / f"alive-{uid}").unlink()
    assert eventually(lambda: ready(True, 1)) != first


def test_pod_ends_by_pre_stop_then_term(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    main = container(
        "sh",
        "-c",
        "trap 'echo term >>/shared/said; exit 0' TERM; echo up >>/shared/said; while true; do sleep 0.1; done",
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "echo pre-stop >>/shared/said; sleep 1"]}}},
        volumeMounts=[{"name": "shared", "mountPath": "/shared"}],
    )
    volume = {"name": "shared", "hostPath": {"path": str(tmp_path)}}
    cluster.apply(pod("polite", main, volumes=[volume], terminationGracePeriodSeconds=10), namespace=namespace)

    def up() -> None:
        assert (tmp_path / "said").exists()

    eventually(up)
    cluster.kubectl("delete", "pod/polite", f"--namespace={namespace}")
    assert (tmp_path / "said").read_text().split() == ["up", "pre-stop", "term"]


def test_container_with_a_read_only_root_writes_to_its_volumes_alone(cluster: Cluster, namespace: str) -> None:
    main = container(
        "sh",
        "-ec",
        "touch /tmp/there; if touch /here /usr/here; then exit 1; fi",
        securityContext={"readOnlyRootFilesystem": True},
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
    )
    cluster.apply(pod("frugal", main, restartPolicy="Never", volumes=[{"name": "tmp", "emptyDir": {}}]), namespace=namespace)
    expect_success(cluster, namespace, "frugal")


def test_pod_waits_for_gpus(cluster: Cluster, namespace: str) -> None:
    def gpu_pod(name: str, gpus: int) -> dict[str, Any]:
        return pod(name, container("sleep", "600", resources={"limits": {"nvidia.com/gpu": gpus}}))

    cluster.apply(gpu_pod("fits", 6), namespace=namespace)
    cluster.kubectl("wait", "--for=condition=Ready", "pod/fits", f"--namespace={namespace}", "--timeout=120s")
    assert cluster.get("pod", "fits", namespace)["spec"]["nodeName"] == "node-1"

    cluster.apply(gpu_pod("waits", 4), namespace=namespace)

    def refused() -> None:
        conditions = cluster.get("pod", "waits", namespace)["status"]["conditions"]
        (scheduled,) = [condition for condition in conditions if condition["type"] == "PodScheduled"]
        assert scheduled["reason"] == "Unschedulable"
        assert "Insufficient nvidia.com/gpu" in scheduled["message"]

    eventually(refused)
    cluster.kubectl("delete", "pod/fits", f"--namespace={namespace}")
    cluster.kubectl("wait", "--for=condition=Ready", "pod/waits", f"--namespace={namespace}", "--timeout=120s")


def test_service_account_may_do_what_its_role_says(cluster: Cluster, namespace: str) -> None:
    where = f"--namespace={namespace}"
    cluster.kubectl("create", "serviceaccount", "reader", where)
    cluster.kubectl("create", "role", "reader", "--verb=list", "--resource=pods", where)
    cluster.kubectl("create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={namespace}:reader", where)
    reader = cluster.service_account_kubeconfig(namespace, "reader")
    cluster.kubectl("get", "pods", where, kubeconfig=reader)
    with pytest.raises(CommandError, match='cannot list resource "secrets"'):
        cluster.kubectl("get", "secrets", where, kubeconfig=reader)


def test_pod_finds_the_api_server_with_its_token(cluster: Cluster, namespace: str) -> None:
    main = container("python3", "-c", LIST_PODS)
    cluster.apply(pod("asks", main, restartPolicy="Never"), namespace=namespace)
    expect_success(cluster, namespace, "asks")


def test_nothing_is_left_of_a_cluster_that_did_not_start(cluster: Cluster, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("kind: Nothing\napiVersion: v1\n")
    name, lines = f"penstock-broken-{uuid4().hex[:8]}", list[str]()
    with pytest.raises(CommandError, match="Nothing"), running(name, [broken], Phases(lines.append)):
        pytest.fail("it started")
    assert not network.namespaces(name)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if name.encode() in read_bytes(path)]
    (failed,) = [line for line in lines if "FAILED" in line]
    assert failed.endswith("manifests applied")
    state = Cluster(name).state
    assert [path.name for path in state.iterdir()] == ["logs"]
    shutil.rmtree(state)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has just ended
        return b""
