"""The configuration of the suite's Envoy: one listener for each way in which gateways call a picker."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.epp_conformance import protocol

_TYPES = "type.googleapis.com/envoy.extensions"
_HTTP = f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions"
PICKER, PICKER_NO_TABLE, POOL, ORIGINAL_DST = "picker", "picker_no_table", "pool", "original_dst"
LISTENERS: tuple[str, ...] = (
    "duplex",
    "duplex-both",
    "buffered",
    "original-dst",
    "subset-one",
    "subset-none",
    "buffered-response",
    "streamed",
    "no-table",
)
MAX_BODY_BYTES = 64 * 1024 * 1024


def bootstrap(
    picker: tuple[str, int], tls: bool, endpoints: Sequence[str], ports: Mapping[str, int], timeout_s: float
) -> dict[str, Any]:
    """The bootstrap as JSON.

    Args:
        picker: Address of the ext_proc port.
        tls: It speaks TLS.
        endpoints: `ip:port` of the pool.
        ports: A free port of 127.0.0.1 for each of `LISTENERS`.
        timeout_s: How long a message to the picker may take.
    """
    listeners = [_listener(name, ports[name], endpoints, timeout_s) for name in LISTENERS]
    callers = [_picker(PICKER, picker, tls), _picker(PICKER_NO_TABLE, picker, tls, hpack_table_size=0)]
    clusters = [*callers, _pool(endpoints), _original_dst()]
    return {"static_resources": {"listeners": listeners, "clusters": clusters}}


def _listener(name: str, port: int, endpoints: Sequence[str], timeout_s: float) -> dict[str, Any]:
    hints = {"subset-one": [endpoints[-1]], "subset-none": []}
    filters = [_hint(hints[name])] if name in hints else []
    route = {
        "cluster": ORIGINAL_DST if name == "original-dst" else POOL,
        "timeout": "60s",
        "retry_policy": {
            "retry_on": "connect-failure",
            "num_retries": 2,
            "retry_host_predicate": [
                _typed("envoy.retry_host_predicates.previous_hosts", "retry.host.previous_hosts.v3.PreviousHostsPredicate")
            ],
        },
    }
    whole = {"match": {"prefix": "/"}, "route": route, "request_body_buffer_limit": MAX_BODY_BYTES}
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        http_protocol_options={"enable_trailers": True},
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [whole]}]},
        http_filters=[*filters, _ext_proc(name, timeout_s), _typed("router", "filters.http.router.v3.Router")],
    )
    return {
        "name": name,
        "address": _address("127.0.0.1", port),
        "filter_chains": [{"filters": [manager]}],
        "enable_reuse_port": False,
    }


def _ext_proc(name: str, timeout_s: float) -> dict[str, Any]:
    both = name == "duplex-both"
    mode = {
        "request_header_mode": "SEND",
        "request_body_mode": {"buffered": "BUFFERED", "buffered-response": "BUFFERED", "streamed": "STREAMED"}.get(
            name, "FULL_DUPLEX_STREAMED"
        ),
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": {"duplex-both": "FULL_DUPLEX_STREAMED", "buffered-response": "BUFFERED"}.get(name, "NONE"),
        "response_trailer_mode": "SEND" if both else "SKIP",
    }
    return _typed(
        "ext_proc",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": PICKER_NO_TABLE if name == "no-table" else PICKER}},
        processing_mode=mode,
        send_body_without_waiting_for_header_response=name == "streamed",
        allow_mode_override=name == "buffered-response",
        message_timeout=f"{timeout_s:g}s",
        metadata_options={
            "forwarding_namespaces": {"untyped": [protocol.SUBSET_NAMESPACE]},
            "receiving_namespaces": {"untyped": [protocol.METADATA_NAMESPACE]},
        },
        response_attributes=["upstream.address"],
    )


def _hint(endpoints: Sequence[str]) -> dict[str, Any]:
    """A filter that states a subset, as gateways do."""
    value = {"metadata_namespace": protocol.SUBSET_NAMESPACE, "value": {protocol.SUBSET: list(endpoints)}}
    return _typed("set_metadata", "filters.http.set_metadata.v3.Config", metadata=[value])


def _picker(name: str, address: tuple[str, int], tls: bool, **options: int) -> dict[str, Any]:
    http2 = {"@type": _HTTP, "explicit_http_config": {"http2_protocol_options": options}}
    cluster: dict[str, Any] = {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "2s",
        "load_assignment": _assignment(name, [address]),
        "typed_extension_protocol_options": {_HTTP.removeprefix("type.googleapis.com/"): http2},
    }
    if tls:
        context = {"common_tls_context": {"alpn_protocols": ["h2"]}}
        cluster["transport_socket"] = _typed("tls", "transport_sockets.tls.v3.UpstreamTlsContext", **context)
    return cluster


def _pool(endpoints: Sequence[str]) -> dict[str, Any]:
    """Return a cluster that sends requests only to the picker's endpoints, in its order. Without one it uses round robin, which
    the checks
    notice."""
    key = {"key": protocol.METADATA_NAMESPACE, "path": [{"key": protocol.DESTINATION}]}
    override = {
        "override_host_sources": [{"header": protocol.DESTINATION}, {"metadata": key}],
        "fallback_policy": _policy("round_robin", "RoundRobin"),
    }
    addresses = [(host.strip("[]"), int(port)) for host, _, port in (endpoint.rpartition(":") for endpoint in endpoints)]
    return {
        "name": POOL,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _assignment(POOL, addresses),
        "load_balancing_policy": _policy("override_host", "OverrideHost", **override),
    }


def _original_dst() -> dict[str, Any]:
    return {
        "name": ORIGINAL_DST,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "1s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": protocol.DESTINATION},
    }


def _policy(name: str, kind: str, **config: object) -> dict[str, Any]:
    typed = _typed(f"envoy.load_balancing_policies.{name}", f"load_balancing_policies.{name}.v3.{kind}", **config)
    return {"policies": [{"typed_extension_config": typed}]}


def _typed(name: str, kind: str, **config: object) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPES}.{kind}", **config}}


def _assignment(name: str, addresses: Sequence[tuple[str, int]]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(host, port)}} for host, port in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
