"""Replicas that speak TLS and want to see a certificate: the operator asks them, by certificates from a Secret."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e import adapters, models
from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.cluster.phases import Phases
from e2e.system import NAMESPACE, OPERATOR, System, without_operators
from e2e.waiting import eventually

MODEL, ADAPTER = "guarded", "guarded-sql"
CERTIFIED = "replica.penstock.internal"
FLAGS = ["--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key", "--ssl-ca-certs=/tls/ca.crt"]


@contextmanager
def operator(system: System, namespace: str, *flags: str) -> Iterator[None]:
    """Has the namespace to itself meanwhile, with the rights of the operator's own ServiceAccount."""
    cluster = system.cluster
    kubeconfig = f"--kubeconfig={cluster.service_account_kubeconfig(NAMESPACE, OPERATOR)}"
    words = [
        "operator",
        kubeconfig,
        f"--namespace={namespace}",
        "--no-leader-elect",
        "--template-secret=replicas-tls",
        "--http-port=19095",
        *flags,
    ]
    cluster.processes.start("operator-tls", [Path(sys.executable).with_name("penstock"), *words], cwd=REPOSITORY)
    try:
        yield
    finally:
        cluster.processes.stop("operator-tls")


def guarded(folder: Path) -> models.Object:
    """A model whose replica has its certificate from a Secret."""
    volume = {"name": "tls", "secret": {"secretName": "replicas-tls"}}
    engine = {"name": "engine", "volumeMounts": [{"name": "tls", "mountPath": "/tls", "readOnly": True}]}
    pool = {"name": "cpu", "template": {"spec": {"volumes": [volume], "containers": [engine]}}}
    lora = {"slots": 1, "sources": [{"prefix": f"file://{folder}"}]}
    return models.small(MODEL, engine={"extraArgs": FLAGS}, pools=[pool], lora=lora)


def test_the_operator_asks_replicas_that_speak_tls(
    system: System, namespace: str, tmp_path: Path, make_authority: Any, phases: Phases
) -> None:
    cluster, authority = system.cluster, make_authority()
    theirs, ours = (
        authority.mount(tmp_path / "theirs", name=CERTIFIED),
        authority.mount(tmp_path / "ours", name="penstock-operator"),
    )
    files = [f"--from-file={name}={(theirs / name).resolve()}" for name in ("ca.crt", "tls.crt", "tls.key")]
    cluster.kubectl("create", "secret", "generic", "replicas-tls", f"--namespace={namespace}", *files)
    adapter = adapters.resource(MODEL, ADAPTER, f"file://{adapters.make(tmp_path / 'sql')}")
    with without_operators(system), models_left_behind(cluster, namespace):
        with operator(system, namespace):
            cluster.apply(guarded(tmp_path), adapter, namespace=namespace)
            with phases("replicas with TLS, and an operator that knows no CA → it says so"):
                eventually(lambda: expect_untold(cluster, namespace), seconds=60)
        with (
            operator(system, namespace, f"--replica-tls={ours}", f"--replica-name={CERTIFIED}"),
            phases("it knows the CA → the adapter is loaded"),
        ):
            eventually(lambda: expect_told(cluster, namespace), seconds=60)


@contextmanager
def models_left_behind(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Nothing of the namespace's models is left for the operators that come back."""
    try:
        yield
    finally:
        cluster.kubectl("delete", f"{models.KIND},{adapters.KIND}", "--all", f"--namespace={namespace}")


def expect_untold(cluster: Cluster, namespace: str) -> None:
    models.ready_pods(cluster, namespace, MODEL, 1)
    ready, found = adapters.told(cluster, namespace, ADAPTER)
    assert ready == "0/1" and "--replica-tls" in found["Loaded"]["message"], found


def expect_told(cluster: Cluster, namespace: str) -> None:
    ready, found = adapters.told(cluster, namespace, ADAPTER)
    assert (ready, found["Ready"]["status"]) == ("1/1", "True"), found
