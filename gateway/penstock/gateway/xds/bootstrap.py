"""What Envoy must be told on its command line: who it is, and where the gateway is. Everything else comes over ADS."""

from typing import Any

GATEWAY_CLUSTER = "penstock_gateway"
"""The static cluster of the gateway process: ADS and the picker are one gRPC server."""

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_MAX_CLIENT_CONNECTIONS = 50_000
_NO_LIMIT = 1_000_000
# Envoy's own figures reach 30 s, and as long an Envoy that started before its gateway would serve nobody.
_RECONNECT = {"retry_back_off": {"base_interval": "0.25s", "max_interval": "2s"}}
_LOOK_UP = "1s"
"""How often the gateway's name is looked up: a new gateway pod has a new address."""


def bootstrap(*, xds_host: str, xds_port: int, node_id: str, admin_port: int | None) -> dict[str, Any]:
    """The bootstrap as JSON.

    Args:
        xds_host: IP address or DNS name of the gateway.
        admin_port: Envoy's admin interface (statistics, configuration dump) on 127.0.0.1; None for none.
    """
    admin = {} if admin_port is None else {"admin": {"address": _address("127.0.0.1", admin_port)}}
    subscription = {"ads": {}, "resource_api_version": "V3"}
    return {
        "node": {"id": node_id, "cluster": "penstock"},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "GRPC",
                "transport_api_version": "V3",
                "grpc_services": [{"envoy_grpc": {"cluster_name": GATEWAY_CLUSTER, "retry_policy": _RECONNECT}}],
            },
            "cds_config": subscription,
            "lds_config": subscription,
        },
        "static_resources": {"clusters": [_gateway_cluster(xds_host, xds_port)]},
        "overload_manager": {"resource_monitors": [_connection_limit()]},
        **admin,
    }


def _gateway_cluster(host: str, port: int) -> dict[str, Any]:
    http2 = {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        # Pings find a gateway whose node has vanished; TCP alone would take a quarter of an hour.
        "explicit_http_config": {"http2_protocol_options": {"connection_keepalive": {"interval": "10s", "timeout": "5s"}}},
    }
    limits = {
        "max_connections": _NO_LIMIT,
        "max_pending_requests": _NO_LIMIT,
        "max_requests": _NO_LIMIT,
        "max_retries": _NO_LIMIT,
    }
    endpoint = {"endpoint": {"address": _address(host, port)}}
    return {
        "name": GATEWAY_CLUSTER,
        "type": "STRICT_DNS",
        "connect_timeout": "1s",
        "dns_refresh_rate": _LOOK_UP,
        "load_assignment": {"cluster_name": GATEWAY_CLUSTER, "endpoints": [{"lb_endpoints": [endpoint]}]},
        "circuit_breakers": {"thresholds": [limits]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
    }


def _connection_limit() -> dict[str, Any]:
    config = {
        "@type": f"{_EXTENSIONS}.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        "max_active_downstream_connections": _MAX_CLIENT_CONNECTIONS,
    }
    return {"name": "envoy.resource_monitors.global_downstream_max_connections", "typed_config": config}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
