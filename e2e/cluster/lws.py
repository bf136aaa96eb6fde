"""The LeaderWorkerSet manager, built from its module and installed as the module's own manifests have it: CRD, RBAC, webhooks and
the Deployment. It differs in what a cluster without images and cert-manager asks for: see `_adapted`.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import yaml

from e2e.cluster import crds
from e2e.cluster.cluster import Cluster
from e2e.waiting import eventually

Object = dict[str, Any]

NAMESPACE: Final = "lws-system"
_MANAGER: Final = "lws-controller-manager"
_WEBHOOKS: Final = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
_PROBE: Final = {"name": "probe", "image": "none"}


@contextmanager
def installed(cluster: Cluster) -> Iterator[None]:
    """The manager runs meanwhile; its CRD goes with it, so all LeaderWorkerSets must be gone by the end."""
    folder = crds.place(cluster.programs, crds.LWS_MANIFESTS)
    objects = list(yaml.safe_load_all(cluster.kubectl("kustomize", str(folder / "default"))))
    secret = _certificate(cluster)
    manifests = yaml.safe_dump_all(_adapted(it, cluster, secret) for it in objects)
    cluster.kubectl("apply", "--server-side", "--filename=-", stdin=manifests)
    try:
        cluster.kubectl("rollout", "status", f"deployment/{_MANAGER}", f"--namespace={NAMESPACE}", "--timeout=120s", timeout=125)
        eventually(lambda: _expect_webhooks(cluster), seconds=120)  # they begin after it calls itself ready
        yield
    finally:
        for kind in _WEBHOOKS:  # first: without the manager they refuse everything
            cluster.kubectl("delete", kind, "--selector=app.kubernetes.io/name=lws")
        cluster.kubectl("delete", "--filename=-", "--ignore-not-found", "--wait=false", stdin=manifests)
        cluster.kubectl("wait", "--for=delete", "crd/leaderworkersets.leaderworkerset.x-k8s.io", "--timeout=120s", timeout=125)


def _certificate(cluster: Cluster) -> dict[str, str]:
    """What a TLS Secret of the webhooks' Service holds, and the authority's certificate."""
    certificate, key, authority = cluster.server_certificate(f"lws-webhook-service.{NAMESPACE}.svc")
    files = {"tls.crt": certificate, "tls.key": key, "ca.crt": authority}
    return {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()}


def _adapted(item: Object, cluster: Cluster, secret: dict[str, str]) -> Object:
    """A manifest for this cluster: the program in place of the image, and our certificate in place of one that the manager makes
    itself, since no kubelet brings a changed Secret into a running pod here."""
    kind = item["kind"]
    if kind == "Secret":
        return {**item, "data": secret}
    if kind in _WEBHOOKS:
        for webhook in item["webhooks"]:
            webhook["clientConfig"]["caBundle"] = secret["ca.crt"]
    if kind == "ConfigMap":
        (name, text) = next(iter(item["data"].items()))
        configuration = yaml.safe_load(text) | {"internalCertManagement": {"enable": False}}
        return {**item, "data": {name: yaml.safe_dump(configuration)}}
    if kind == "Deployment":
        item["spec"]["replicas"] = 1
        (container,) = item["spec"]["template"]["spec"]["containers"]
        container["command"] = [str(cluster.programs / "lws-manager")]
        container["readinessProbe"]["initialDelaySeconds"] = 0
        del container["resources"]  # a whole core, which the test nodes may not have
    return item


def _expect_webhooks(cluster: Cluster) -> None:
    """Fails while the manager does not look at what is created."""
    template = {"workerTemplate": {"spec": {"containers": [_PROBE]}}}
    probe = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "probe"},
        "spec": {"leaderWorkerTemplate": template},
    }
    cluster.kubectl("create", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump(probe))
