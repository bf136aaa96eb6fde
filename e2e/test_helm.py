"""The chart, installed, upgraded and removed by a real Helm on a real API server."""

import json
import os
import shutil
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from charts.tests.rendered_chart import CHART, MODES
from e2e import models
from e2e.cluster import crds, network
from e2e.cluster.build import programs_folder
from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.cluster.commands import CommandError, run
from e2e.cluster.helm import Helm
from e2e.cluster.phases import Phases
from e2e.system import NAMESPACE, OPERATOR, System
from e2e.waiting import eventually

# What Kubernetes and a running release write by themselves, and take away by themselves.
PASSING = {"APIService", "Event", "EndpointSlice", "Endpoints", "ControllerRevision", "ReplicaSet"}
HERE = f"--namespace={NAMESPACE}"


@pytest.fixture
def api_server(phases: Phases) -> Iterator[Cluster]:
    """An API server of this test's own, that knows none of our kinds; no pods run."""
    cluster = Cluster(f"penstock-helm-{os.getpid()}")
    cluster.create()
    try:
        with network.entered(cluster.name):
            cluster.start([], phases, controllers=False)
            yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(cluster.state)


def everything(cluster: Cluster) -> set[str]:
    """All objects there are, as kind, namespace and name."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "--output=name").split()
    listed = json.loads(cluster.kubectl("get", ",".join(kinds), "--all-namespaces", "--output=json"))["items"]
    found = {(it["kind"], it["metadata"].get("namespace", ""), it["metadata"]["name"]) for it in listed}
    return {"/".join(it) for it in found if it[0] not in PASSING}


def columns(cluster: Cluster) -> list[str]:
    """What `kubectl get inferencemodels` prints."""
    (version,) = cluster.get("crd", "inferencemodels.penstock.dev")["spec"]["versions"]
    return [column["name"] for column in version["additionalPrinterColumns"]]


def older_chart(folder: Path) -> Path:
    """The chart as it might have been: with a CRD that says less."""
    chart = shutil.copytree(CHART, folder / "penstock")
    path = chart / "files/crds/inferencemodels.penstock.dev.yaml"
    crd = yaml.safe_load(path.read_text())
    crd["spec"]["versions"][0]["additionalPrinterColumns"].pop()
    path.write_text(yaml.safe_dump(crd))
    return chart


def test_every_mode_is_taken_by_the_api_server_and_removing_leaves_nothing(api_server: Cluster, tmp_path: Path) -> None:
    cluster, helm = api_server, Helm(tmp_path, api_server.environment)
    cluster.kubectl("apply", "--server-side", f"--kustomize={REPOSITORY / 'manifests'}")
    for namespace in ("team-a", "team-b"):
        cluster.kubectl("create", "namespace", namespace)
    for source in (crds.POD_MONITORS, crds.PROMETHEUS_RULES):
        cluster.kubectl("apply", "--server-side", f"--filename={crds.place(programs_folder(), source)}")
    cluster.await_crds("crd", "--all")
    for name, values in MODES.items():
        rendered = helm("template", "penstock", CHART, HERE, values=yaml.safe_dump(values))
        checked = ("--dry-run=server", "--validate=strict", f"--field-manager={name}", "--force-conflicts")
        cluster.kubectl("apply", "--server-side", *checked, "--filename=-", stdin=rendered)

    # What kubectl had applied becomes a release; an upgrade brings a newer CRD and the values.
    before = everything(cluster)
    newest = columns(cluster)
    helm("install", "penstock", older_chart(tmp_path), HERE, "--take-ownership", "--force-conflicts")
    assert columns(cluster) == newest[:-1]
    helm("upgrade", "penstock", CHART, HERE, "--force-conflicts", "--set=operator.extraArgs={--resync=60}")
    assert columns(cluster) == newest
    (container,) = cluster.get("deployment", OPERATOR, NAMESPACE)["spec"]["template"]["spec"]["containers"]
    assert "--resync=60" in container["args"]
    assert {it for it in everything(cluster) if not it.startswith("Secret/")} == before

    # The models outlive the release, until somebody says otherwise.
    cluster.apply(models.small("kept"))
    helm("uninstall", "penstock", HERE)
    cluster.get(models.KIND, "kept")
    ours = {it for it in everything(cluster) if "penstock" in it or it.startswith("InferenceModel")}
    kept = {f"Namespace//{NAMESPACE}", "InferenceModel/default/kept"}
    kept |= {f"CustomResourceDefinition//{kind}.penstock.dev" for kind in ("inferencemodels", "loraadapters")}
    assert ours == kept
    helm("install", "penstock", CHART, HERE, "--set=crds.keep=false")
    helm("uninstall", "penstock", HERE)

    def only_the_namespace() -> None:
        assert {it for it in everything(cluster) if "penstock" in it} == {f"Namespace//{NAMESPACE}"}

    eventually(only_the_namespace)


@contextmanager
def without_operator(system: System) -> Iterator[None]:
    """The system's own operator, which acts in all namespaces, does nothing meanwhile."""
    cluster = system.cluster
    cluster.kubectl("scale", f"deployment/{OPERATOR}", HERE, "--replicas=0")
    eventually(lambda: expect_none(system.pods(OPERATOR)), seconds=120)
    try:
        yield
    finally:
        cluster.kubectl("scale", f"deployment/{OPERATOR}", HERE, "--replicas=2")
        cluster.kubectl("rollout", "status", f"deployment/{OPERATOR}", HERE, "--timeout=120s", timeout=125)


def expect_none(found: list[models.Object]) -> None:
    assert not found


def may(cluster: Cluster, account: str, *right: str) -> bool:
    """Whether a ServiceAccount (namespace:name) has a right."""
    try:
        cluster.kubectl("auth", "can-i", *right, f"--as=system:serviceaccount:{account}")
    except CommandError as refusal:
        assert str(refusal).endswith(": no"), refusal
        return False
    return True


def test_in_one_namespace_with_no_right_beyond(system: System, namespace: str, tmp_path: Path, phases: Phases) -> None:
    cluster, helm, home = system.cluster, Helm(tmp_path, system.cluster.environment), f"{namespace}-home"
    single = {"replicaCount": 1}
    encrypted = {"tls": {"secretName": "certificate"}}
    values = {
        "watchNamespaces": [namespace],
        "crds": {"install": False},
        "gateway": single | encrypted,
        "envoy": single | encrypted,
    }
    wait = (f"--namespace={home}", "--wait", "--timeout=120s")
    cluster.kubectl("create", "namespace", home)
    eventually(lambda: cluster.get("serviceaccount", "default", home))
    authority = make_certificate(cluster, home, tmp_path)
    before = everything(cluster)
    with without_operator(system):
        with phases("helm install of a release for one namespace"):
            helm("install", "edge", CHART, *wait, values=yaml.safe_dump(values), timeout=125)
        account = f"{home}:penstock-operator"
        assert may(cluster, account, "create", "deployments.apps", f"--namespace={namespace}")
        assert may(cluster, account, "list", "pods", f"--namespace={home}")
        for right in ("get secrets", "create pods", "create pods/exec", "create roles", "update roles"):
            assert not may(cluster, account, *right.split(), f"--namespace={namespace}"), right
        for elsewhere in ("default", home, NAMESPACE):
            assert not may(cluster, account, "list", "inferencemodels", f"--namespace={elsewhere}")
            assert not may(cluster, account, "create", "deployments.apps", f"--namespace={elsewhere}")

        cluster.apply(models.small("unseen"), namespace=home)
        with models.applied(cluster, namespace, models.small("seen")):
            with phases("a model there → Ready"):
                models.wait_until_ready(cluster, namespace, "seen")
            eventually(lambda: ask(cluster, home, "seen", authority), seconds=120)
            pods = models.pods(cluster, namespace, "seen").keys()
            with phases("helm upgrade"):
                helm("upgrade", "edge", CHART, *wait, "--reuse-values", "--set=operator.logLevel=DEBUG", timeout=125)
            (container,) = cluster.get("deployment", OPERATOR, home)["spec"]["template"]["spec"]["containers"]
            assert "--log-level=DEBUG" in container["args"]
            models.wait_until_ready(cluster, namespace, "seen")
            assert models.pods(cluster, namespace, "seen").keys() == pods, "an upgrade of the system restarts no engine"
        assert "conditions" not in cluster.get(models.KIND, "unseen", home).get("status", {})
        cluster.kubectl("delete", models.KIND, "unseen", f"--namespace={home}")
        with phases("helm uninstall → nothing left"):
            helm("uninstall", "edge", *wait, timeout=125)
            eventually(lambda: expect_same(everything(cluster), before), seconds=120)
    cluster.kubectl("delete", "namespace", home, "--wait=false")


def expect_same(found: set[str], before: set[str]) -> None:
    left = {it for it in found - before if f"/{NAMESPACE}/" not in it}
    assert not left, f"{', '.join(sorted(left))} are left"


def make_certificate(cluster: Cluster, home: str, folder: Path) -> Path:
    """A Secret `certificate` for the gateways and for clients, signed by itself; the file that says so."""
    names = f"DNS:penstock-gateway.{home}.svc,DNS:penstock-envoy.{home}.svc"
    key, certificate = folder / "tls.key", folder / "tls.crt"
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=penstock", "-days", "2"]
    made += ["-addext", f"subjectAltName={names}", "-addext", "keyUsage=critical,keyCertSign,digitalSignature"]
    run("openssl", "req", *made, "-keyout", key, "-out", certificate)
    files = (f"--from-file={key}", f"--from-file={certificate}", f"--from-file=ca.crt={certificate}")
    cluster.kubectl("create", "secret", "generic", "certificate", *files, f"--namespace={home}")
    return certificate


def ask(cluster: Cluster, home: str, model: str, authority: Path) -> None:
    """A completion through the release's own Envoy, encrypted."""
    service = cluster.get("service", "penstock-envoy", home)["spec"]
    (port,) = service["ports"]
    assert port["name"] == "https"
    host = f"penstock-envoy.{home}.svc"
    with httpx.Client(verify=ssl.create_default_context(cafile=authority), trust_env=False, timeout=20) as client:
        answer = client.post(
            f"https://{service['clusterIP']}:{port['port']}/v1/completions",
            json={"model": model, "prompt": "json.loads", "max_tokens": 4},
            headers={"Host": host},
            extensions={"sni_hostname": host},
        )
    assert answer.status_code == 200, answer.text
