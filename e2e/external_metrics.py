"""An API of external metrics that says what a test tells it: all that a HorizontalPodAutoscaler asks for.

An aggregated API server of this process, by way of an APIService, as Prometheus' adapter and KEDA are ones.
"""

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from e2e.cluster import network
from e2e.cluster.cluster import Cluster

Object = dict[str, Any]
GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
API = f"/apis/{GROUP}/{VERSION}"
SERVICE = "external-metrics"
METRIC = "requests"
"""The only one there is; of which model, its label `model` says."""


class Metrics(ThreadingHTTPServer):
    """What is told by model."""

    daemon_threads = True

    def __init__(self, certificate: ssl.SSLContext) -> None:
        super().__init__((network.GATEWAY, 0), Handler)
        self.told: dict[str, int] = {}
        # The handshake is the connection's own thread's: a peer that says nothing keeps nobody else waiting.
        self.socket = certificate.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)


class Handler(BaseHTTPRequestHandler):
    """One request of the API server's."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """What the API has, and `namespaces/NAMESPACE/METRIC?labelSelector=model%3DNAME`."""
        path, _, query = self.path.partition("?")
        if path == API:
            resource = {
                "name": METRIC,
                "singularName": "",
                "namespaced": True,
                "kind": "ExternalMetricValueList",
                "verbs": ["get"],
            }
            head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}"}
            self._answer(200, head | {"resources": [resource]})
        elif path.startswith(f"{API}/namespaces/") and path.endswith(f"/{METRIC}"):
            head = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}}
            self._answer(200, head | {"items": self._values(query)})
        else:
            self._answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404})

    def _values(self, query: str) -> list[Object]:
        assert isinstance(self.server, Metrics)
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        return [
            {"metricName": METRIC, "metricLabels": {"model": model}, "timestamp": now, "value": str(value)}
            for model, value in self.server.told.items()
            if f"labelSelector=model%3D{model}" in query.split("&")
        ]

    def _answer(self, status: int, body: Object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """The looks are many, and tell nothing."""


@contextmanager
def served(cluster: Cluster, namespace: str) -> Iterator[dict[str, int]]:
    """The API is there meanwhile, and says of each model what the result has. Called from inside the cluster's network."""
    certificate, key, authority = cluster.server_certificate(f"{SERVICE}.{namespace}.svc")
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(certificate, key)
    server = Metrics(trust)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        cluster.apply(*_way_to(server.server_address[1], namespace, authority.read_bytes()), namespace=namespace)
        name = f"apiservice/{VERSION}.{GROUP}"
        try:
            cluster.kubectl("wait", "--for=condition=Available", name, "--timeout=120s")
            yield server.told
        finally:
            cluster.kubectl("delete", name)
    finally:
        server.shutdown()
        thread.join(timeout=60)
        server.server_close()


def _way_to(port: int, namespace: str, authority: bytes) -> tuple[Object, Object, Object]:
    """A Service whose endpoint is no pod, and the APIService by which the API server passes requests on to it."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVICE},
        "spec": {"ports": [{"name": "https", "port": 443, "targetPort": port}]},
    }
    endpoint = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": SERVICE, "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [network.GATEWAY], "conditions": {"ready": True}}],
    }
    api = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{VERSION}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "version": VERSION,
            "service": {"name": SERVICE, "namespace": namespace},
            "caBundle": base64.b64encode(authority).decode(),
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
    return service, endpoint, api
