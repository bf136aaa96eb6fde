"""What Envoy must be told on its command line: who it is, and where the gateways are. Everything else comes over ADS."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

GATEWAY_CLUSTER = "penstock_gateway"
"""The static cluster of the gateway processes' control plane: ADS, and the access log."""
PICKER_CLUSTER = "penstock_picker"
"""The static cluster of the gateway processes' pickers."""
METRICS = "penstock_metrics"
"""The listener that answers `/metrics`, and its cluster: Envoy's own admin interface."""
READINESS = "readiness"
"""The name under which the gateway's gRPC health says whether it may be asked."""

_CLUSTER = "^cluster.(penstock_[a-z]+|[^/]+/[^/]+/[^./]+)"
_TOLD = (
    "^http.penstock.(downstream_rq_(total|active|time|[1-5]xx)|downstream_cx_(total|active))$",
    "^http.penstock.ext_proc.(streams_|message_timeouts|spurious_msgs|failure_mode|immediate_responses|rejected_header)",
    f"{_CLUSTER}.upstream_rq_(total|active|time|[1-5][0-9][0-9]|retry|retry_success|retry_limit_exceeded)$",
    f"{_CLUSTER}.upstream_cx_(total|active|connect_fail)$",
    f"{_CLUSTER}.(membership_(total|healthy)|circuit_breakers.default.(cx|rq|rq_pending|rq_retry)_open)$",
    "^listener.[^w]*downstream_(global_cx_overflow|cx_overload_reject)$",
    "^server.(live|uptime|memory_allocated|concurrency)$",
)
"""Statistics at `/metrics`, by Envoy's own names: with a thousand models, all of them would be tens of megabytes a scrape. A dot
is any character."""
_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_MAX_CLIENT_CONNECTIONS = 50_000
_NO_LIMIT = 1_000_000
# Envoy's own figures reach 30 s, and as long an Envoy that started before its gateway would serve nobody.
_RECONNECT = {"retry_back_off": {"base_interval": "0.25s", "max_interval": "2s"}}
_LOOK_UP = "1s"
"""How often a gateway's name is looked up: a new gateway pod has a new address."""


class Address(NamedTuple):
    """Address of a gateway: an IP address or a DNS name, and a port."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class GatewayTls:
    """TLS on the way to the gateways."""

    ca: Path
    """PEM: who signs the gateways' certificates."""
    names: tuple[str, ...] = ()
    """Names of which a gateway's certificate must hold one. Empty: any certificate of the CA."""


@dataclass(frozen=True, kw_only=True)
class BootstrapSettings:
    """What the flags of `penstock envoy` say."""

    node_id: str
    gateways: Sequence[Address]
    """The control plane of each gateway process. The first that is ready is asked, the next when it is not."""
    pickers: Sequence[Address] = ()
    """Their pickers, in the same order; none: at the same addresses."""
    admin: Address | Path
    """Envoy's admin interface: TCP, or a Unix socket."""
    metrics: Address | None = None
    """Address of Envoy's `GET /metrics` in Prometheus' format, which serves nothing else. None: none."""
    tls: GatewayTls | None = None


def bootstrap(settings: BootstrapSettings) -> dict[str, Any]:
    """The bootstrap as JSON."""
    subscription = {"ads": {}, "resource_api_version": "V3"}
    gateways = _cluster(GATEWAY_CLUSTER, settings.gateways, settings.tls)
    # A control plane that is not well is left at once; what a picker has begun, it may still end.
    gateways["close_connections_on_host_health_failure"] = True
    pickers = _cluster(PICKER_CLUSTER, settings.pickers or settings.gateways, settings.tls)
    own = {} if settings.metrics is None else {"listeners": [_metrics_listener(settings.metrics)]}
    clusters = [gateways, pickers, *([] if settings.metrics is None else [_admin_cluster(settings.admin)])]
    return {
        "node": {"id": settings.node_id, "cluster": "penstock"},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "DELTA_GRPC",
                "transport_api_version": "V3",
                "grpc_services": [{"envoy_grpc": {"cluster_name": GATEWAY_CLUSTER, "retry_policy": _RECONNECT}}],
            },
            "cds_config": subscription,
            "lds_config": subscription,
        },
        "static_resources": {"clusters": clusters, **own},
        "overload_manager": {"resource_monitors": [_connection_limit()]},
        "admin": {"address": _admin(settings.admin)},
    }


def _cluster(name: str, addresses: Sequence[Address], tls: GatewayTls | None) -> dict[str, Any]:
    """The gateways, each a priority of its own: all is asked of the first that is ready."""
    http2 = {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        # Pings find a gateway that hangs, or whose node has vanished; what it holds goes to the next one.
        "explicit_http_config": {"http2_protocol_options": {"connection_keepalive": {"interval": "2s", "timeout": "2.5s"}}},
    }
    limits = {
        "max_connections": _NO_LIMIT,
        "max_pending_requests": _NO_LIMIT,
        "max_requests": _NO_LIMIT,
        "max_retries": _NO_LIMIT,
    }
    priorities = [
        {"priority": priority, "lb_endpoints": [{"endpoint": {"address": _address(it.host, it.port)}}]}
        for priority, it in enumerate(addresses)
    ]
    return {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "1s",
        "dns_refresh_rate": _LOOK_UP,
        "load_assignment": {"cluster_name": name, "endpoints": priorities},
        "health_checks": [_health_check()],
        # None is well: none is asked, rather than one that knows no fleet yet. What is found counts at once, not a second later.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"},
        "circuit_breakers": {"thresholds": [{"priority": priority, **limits} for priority in ("DEFAULT", "HIGH")]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        **({} if tls is None else {"transport_socket": _transport_socket(tls)}),
    }


def _health_check() -> dict[str, Any]:
    """Return a health check that runs twice per second while a gateway is away, so that it is used again as soon as it is back.

    A gateway that hangs is left within five seconds; one that is slow for two seconds is kept. A request that finds no gateway
    goes to the next one in any case.
    """
    return {
        "timeout": "1.5s",
        "interval": "1s",
        "interval_jitter": "0.1s",
        "unhealthy_interval": "0.5s",
        "no_traffic_interval": "0.5s",
        "no_traffic_healthy_interval": "1s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": READINESS},
    }


def _transport_socket(tls: GatewayTls) -> dict[str, Any]:
    names = [{"san_type": kind, "matcher": {"exact": name}} for name in tls.names for kind in ("DNS", "IP_ADDRESS")]
    validation: dict[str, Any] = {
        "trusted_ca": {"filename": str(tls.ca)},
        **({"match_typed_subject_alt_names": names} if names else {}),
    }
    context: dict[str, Any] = {"validation_context": validation, "alpn_protocols": ["h2"]}
    config = {
        "@type": f"{_EXTENSIONS}.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": context,
        **({"sni": tls.names[0]} if tls.names else {}),
    }
    return {"name": "envoy.transport_sockets.tls", "typed_config": config}


def _connection_limit() -> dict[str, Any]:
    config = {
        "@type": f"{_EXTENSIONS}.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        "max_active_downstream_connections": _MAX_CLIENT_CONNECTIONS,
    }
    return {"name": "envoy.resource_monitors.global_downstream_max_connections", "typed_config": config}


def _metrics_listener(where: Address) -> dict[str, Any]:
    """One path of the admin interface: the others can end Envoy."""
    path = f"/stats/prometheus?filter={quote('|'.join(_TOLD), safe='')}"
    route = {
        "match": {"path": "/metrics", "headers": [{"name": ":method", "string_match": {"exact": "GET"}}]},
        "route": {"cluster": METRICS, "regex_rewrite": {"pattern": {"regex": ".*"}, "substitution": path}},
    }
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": METRICS,
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {"virtual_hosts": [{"name": METRICS, "domains": ["*"], "routes": [route]}]},
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {
        "name": METRICS,
        "address": _address(where.host, where.port),
        "ignore_global_conn_limit": True,  # what limits clients must not hide what they do
        "filter_chains": [{"filters": filters}],
    }


def _admin_cluster(where: Address | Path) -> dict[str, Any]:
    address = {"pipe": {"path": str(where)}} if isinstance(where, Path) else _address(where.host, where.port)
    endpoint = {"endpoint": {"address": address}}
    assignment = {"cluster_name": METRICS, "endpoints": [{"lb_endpoints": [endpoint]}]}
    return {"name": METRICS, "type": "STATIC", "connect_timeout": "1s", "load_assignment": assignment}


def _admin(where: Address | Path) -> dict[str, Any]:
    if isinstance(where, Path):
        return {"pipe": {"path": str(where), "mode": 0o600}}
    return _address(where.host, where.port)


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
