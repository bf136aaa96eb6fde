"""Envoy's own spans: what it asks the picker and the replicas, told to the same collector as the gateway's."""

from datetime import timedelta
from urllib.parse import urlsplit

from penstock.gateway._pb.envoy.config.cluster.v3.cluster_pb2 import Cluster
from penstock.gateway._pb.envoy.config.core.v3.address_pb2 import Address, SocketAddress
from penstock.gateway._pb.envoy.config.core.v3.http_service_pb2 import HttpService
from penstock.gateway._pb.envoy.config.core.v3.http_uri_pb2 import HttpUri
from penstock.gateway._pb.envoy.config.endpoint.v3.endpoint_components_pb2 import Endpoint, LbEndpoint, LocalityLbEndpoints
from penstock.gateway._pb.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from penstock.gateway._pb.envoy.config.trace.v3.http_tracer_pb2 import Tracing
from penstock.gateway._pb.envoy.config.trace.v3.opentelemetry_pb2 import OpenTelemetryConfig
from penstock.gateway._pb.envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2 import (
    HttpConnectionManager,
)
from penstock.gateway._pb.envoy.type.v3.percent_pb2 import Percent
from penstock.gateway.tracing import TraceSettings
from penstock.gateway.xds.anys import pack

CLUSTER = "penstock_traces"
TIMEOUT = timedelta(seconds=2)


def tracing(settings: TraceSettings) -> HttpConnectionManager.Tracing:
    """What the listener records: of requests that bring a trace, those that it records; of others a share."""
    collector = HttpUri(uri=settings.endpoint, cluster=CLUSTER, timeout=TIMEOUT)
    config = OpenTelemetryConfig(http_service=HttpService(http_uri=collector), service_name="penstock-envoy")
    return HttpConnectionManager.Tracing(
        random_sampling=Percent(value=settings.percent),
        provider=Tracing.Http(name="envoy.tracers.opentelemetry", typed_config=pack(config)),
    )


def collector_cluster(settings: TraceSettings) -> Cluster:
    """The way to the collector."""
    url = urlsplit(settings.endpoint)
    address = Address(socket_address=SocketAddress(address=url.hostname or "", port_value=url.port or 80))
    endpoint = LbEndpoint(endpoint=Endpoint(address=address))
    return Cluster(
        name=CLUSTER,
        type=Cluster.STRICT_DNS,
        connect_timeout=TIMEOUT,
        load_assignment=ClusterLoadAssignment(cluster_name=CLUSTER, endpoints=[LocalityLbEndpoints(lb_endpoints=[endpoint])]),
    )
