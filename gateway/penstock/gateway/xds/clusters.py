"""One Envoy cluster a pool, and the endpoints in it."""

import socket
from collections.abc import Iterable
from datetime import timedelta

from google.protobuf.struct_pb2 import Struct, Value
from google.protobuf.wrappers_pb2 import UInt32Value

from penstock.api import headers
from penstock.api.fleet import Pool, Replica
from penstock.gateway._pb.envoy.config.cluster.v3.circuit_breaker_pb2 import CircuitBreakers
from penstock.gateway._pb.envoy.config.cluster.v3.cluster_pb2 import Cluster, LoadBalancingPolicy, UpstreamConnectionOptions
from penstock.gateway._pb.envoy.config.core.v3.address_pb2 import Address, BindConfig, SocketAddress, TcpKeepalive
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import Metadata
from penstock.gateway._pb.envoy.config.core.v3.extension_pb2 import TypedExtensionConfig
from penstock.gateway._pb.envoy.config.core.v3.health_check_pb2 import HealthStatus
from penstock.gateway._pb.envoy.config.core.v3.protocol_pb2 import Http1ProtocolOptions
from penstock.gateway._pb.envoy.config.core.v3.protocol_pb2 import HttpProtocolOptions as CommonHttpOptions
from penstock.gateway._pb.envoy.config.core.v3.socket_option_pb2 import SocketOption
from penstock.gateway._pb.envoy.config.endpoint.v3.endpoint_components_pb2 import Endpoint, LbEndpoint, LocalityLbEndpoints
from penstock.gateway._pb.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from penstock.gateway._pb.envoy.extensions.load_balancing_policies.override_host.v3.override_host_pb2 import OverrideHost
from penstock.gateway._pb.envoy.extensions.load_balancing_policies.round_robin.v3.round_robin_pb2 import RoundRobin
from penstock.gateway._pb.envoy.extensions.upstreams.http.v3.http_protocol_options_pb2 import HttpProtocolOptions
from penstock.gateway._pb.envoy.type.metadata.v3.metadata_pb2 import MetadataKey
from penstock.gateway._pb.envoy.type.v3.percent_pb2 import Percent
from penstock.gateway.xds.ads import ADS
from penstock.gateway.xds.anys import pack
from penstock.gateway.xds.replica_tls import transport_socket
from penstock.http.replica_tls import ReplicaTls

CONNECT_TIMEOUT = timedelta(seconds=2)
UPSTREAM_IDLE_TIMEOUT = timedelta(seconds=30)
"""Well below an engine's own limit: else Envoy would now and then send a request into a connection that is being closed."""
UNACKNOWLEDGED = timedelta(seconds=20)
"""Seconds without an acknowledgement after which a node counts as gone. Linux would retry for a quarter of an hour: keepalive
probes only idle connections."""
NO_LIMIT = 1_000_000
"""Envoy's circuit breakers default to 1,024 requests and 3 retries; how much is too much is the picker's decision."""


def cluster(pool: Pool, tls: ReplicaTls | None = None) -> Cluster:
    """The pool's cluster: only the picker's destinations, in the picker's order; round robin over healthy ones after that."""
    return Cluster(
        name=pool.id,
        type=Cluster.EDS,
        eds_cluster_config=Cluster.EdsClusterConfig(eds_config=ADS, service_name=pool.id),
        connect_timeout=CONNECT_TIMEOUT,
        transport_socket=None if tls is None else transport_socket(tls),
        load_balancing_policy=_override_host(),
        # With no healthy endpoint the fallback answers 503 instead of trying the unhealthy ones.
        common_lb_config=Cluster.CommonLbConfig(healthy_panic_threshold=Percent(value=0)),
        circuit_breakers=_no_circuit_breakers(),
        typed_extension_protocol_options={"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": pack(_http1())},
        # Streams may be silent for long, so a node that vanished is noticed below HTTP.
        upstream_connection_options=UpstreamConnectionOptions(
            tcp_keepalive=TcpKeepalive(
                keepalive_time=UInt32Value(value=30),
                keepalive_interval=UInt32Value(value=5),
                keepalive_probes=UInt32Value(value=3),
            )
        ),
        upstream_bind_config=BindConfig(
            socket_options=[
                SocketOption(
                    description="TCP_USER_TIMEOUT",
                    level=socket.IPPROTO_TCP,
                    name=socket.TCP_USER_TIMEOUT,
                    int_value=int(UNACKNOWLEDGED.total_seconds() * 1000),
                    state=SocketOption.STATE_PREBIND,
                )
            ]
        ),
    )


def load_assignment(pool: Pool, replicas: Iterable[Replica]) -> ClusterLoadAssignment:
    """The pool's endpoints, with or without any, ordered by address. The ranks of a process are one.

    Replicas that are not to be picked stay members, since a destination must be one when the request arrives; their health keeps
    the fallback away from them.
    """
    members = sorted((it for it in replicas if not it.rank), key=lambda replica: (replica.host, replica.port))
    endpoints = [
        LbEndpoint(endpoint=_endpoint(replica), health_status=_health(replica), metadata=_uid(replica)) for replica in members
    ]
    return ClusterLoadAssignment(cluster_name=pool.id, endpoints=[LocalityLbEndpoints(lb_endpoints=endpoints)])


def _override_host() -> LoadBalancingPolicy:
    source = OverrideHost.OverrideHostSource
    key = MetadataKey(key=headers.METADATA_NAMESPACE, path=[MetadataKey.PathSegment(key=headers.DESTINATION)])
    policy = OverrideHost(
        override_host_sources=[source(header=headers.DESTINATION), source(metadata=key)],
        fallback_policy=_policy("envoy.load_balancing_policies.round_robin", RoundRobin()),
    )
    return _policy("envoy.load_balancing_policies.override_host", policy)


def _policy(name: str, config: OverrideHost | RoundRobin) -> LoadBalancingPolicy:
    extension = TypedExtensionConfig(name=name, typed_config=pack(config))
    return LoadBalancingPolicy(policies=[LoadBalancingPolicy.Policy(typed_extension_config=extension)])


def _no_circuit_breakers() -> CircuitBreakers:
    limit = UInt32Value(value=NO_LIMIT)
    thresholds = CircuitBreakers.Thresholds(
        max_connections=limit, max_pending_requests=limit, max_requests=limit, max_retries=limit
    )
    return CircuitBreakers(thresholds=[thresholds])


def _http1() -> HttpProtocolOptions:
    return HttpProtocolOptions(
        common_http_protocol_options=CommonHttpOptions(idle_timeout=UPSTREAM_IDLE_TIMEOUT),
        explicit_http_config=HttpProtocolOptions.ExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions()),
    )


def _endpoint(replica: Replica) -> Endpoint:
    return Endpoint(address=Address(socket_address=SocketAddress(address=replica.host, port_value=replica.port)))


def _uid(replica: Replica) -> Metadata:
    """What Envoy tells clients of who has answered."""
    return Metadata(filter_metadata={headers.LOG_NAMESPACE: Struct(fields={headers.UID: Value(string_value=replica.uid)})})


def _health(replica: Replica) -> HealthStatus:
    if replica.terminating or replica.cordoned:
        return HealthStatus.DRAINING
    return HealthStatus.HEALTHY if replica.ready else HealthStatus.UNHEALTHY
