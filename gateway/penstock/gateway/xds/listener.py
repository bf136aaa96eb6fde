"""The one listener: client headers cleaned, the picker asked, errors in OpenAI's JSON, one line of JSON a request in the log."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePosixPath

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import BoolValue

from penstock.api import headers
from penstock.gateway._pb.envoy.config.accesslog.v3.accesslog_pb2 import AccessLog, AccessLogFilter, MetadataFilter
from penstock.gateway._pb.envoy.config.common.mutation_rules.v3.mutation_rules_pb2 import HeaderMutation as Mutation
from penstock.gateway._pb.envoy.config.core.v3.address_pb2 import Address, SocketAddress
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import DataSource, TransportSocket, WatchedDirectory
from penstock.gateway._pb.envoy.config.core.v3.config_source_pb2 import ApiVersion
from penstock.gateway._pb.envoy.config.core.v3.extension_pb2 import TypedExtensionConfig
from penstock.gateway._pb.envoy.config.core.v3.substitution_format_string_pb2 import SubstitutionFormatString
from penstock.gateway._pb.envoy.config.listener.v3.listener_components_pb2 import Filter, FilterChain
from penstock.gateway._pb.envoy.config.listener.v3.listener_pb2 import Listener
from penstock.gateway._pb.envoy.extensions.access_loggers.grpc.v3.als_pb2 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from penstock.gateway._pb.envoy.extensions.access_loggers.stream.v3.stream_pb2 import StdoutAccessLog
from penstock.gateway._pb.envoy.extensions.filters.http.router.v3.router_pb2 import Router
from penstock.gateway._pb.envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2 import (
    HttpConnectionManager,
    HttpFilter,
    Rds,
)
from penstock.gateway._pb.envoy.extensions.http.early_header_mutation.header_mutation.v3.header_mutation_pb2 import HeaderMutation
from penstock.gateway._pb.envoy.extensions.transport_sockets.tls.v3.common_pb2 import TlsCertificate, TlsParameters
from penstock.gateway._pb.envoy.extensions.transport_sockets.tls.v3.secret_pb2 import SdsSecretConfig, Secret
from penstock.gateway._pb.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import CommonTlsContext, DownstreamTlsContext
from penstock.gateway._pb.envoy.type.matcher.v3.metadata_pb2 import MetadataMatcher
from penstock.gateway._pb.envoy.type.matcher.v3.value_pb2 import ValueMatcher
from penstock.gateway.tracing import TraceSettings
from penstock.gateway.xds.ads import ADS
from penstock.gateway.xds.anys import pack
from penstock.gateway.xds.asking import filters, picker
from penstock.gateway.xds.replies import local_replies
from penstock.gateway.xds.routes import IDLE_TIMEOUT, ROUTE_NAME
from penstock.gateway.xds.tracing import tracing

LISTENER_NAME = "penstock"
CERTIFICATE_NAME = "penstock_listener"
ENDS_EVERY = timedelta(milliseconds=200)
"""How often the gateway hears what has ended."""

DECISION = ("model", "tenant", "policy", "score", "prompt_tokens", "resident_tokens", "waited_ms")
"""What the picker notes of its decision, as metadata."""
# What is logged of a request: how it was decided and what became of it, and nothing of what was asked (no query, no body).
ACCESS_LOG = {
    "time": "%START_TIME%",
    "request_id": f"%REQ({headers.REQUEST_ID})%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    **{name: f"%DYNAMIC_METADATA({headers.LOG_NAMESPACE}:{name})%" for name in DECISION},
    "pool": f"%REQ({headers.POOL})%",
    "destinations": f"%REQ({headers.DESTINATION})%",
    "upstream": "%UPSTREAM_HOST%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "replica": f"%RESP({headers.REPLICA})%",
    "reason": f"%RESP({headers.REASON})%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "duration_ms": "%DURATION%",
}


@dataclass(frozen=True)
class ListenerSettings:
    """How Envoy listens for clients and serves them."""

    host: str
    port: int
    tls: PurePosixPath | None = None
    """A folder on Envoy's machine with `tls.crt` and `tls.key`, such as a mounted Secret; None: no TLS."""
    fail_open: bool = False
    """While every gateway is away, send requests to the healthy replicas in turn. Only possible with a single model."""
    traces: TraceSettings | None = None
    """None: nothing is traced."""


def certificate(folder: PurePosixPath) -> Secret:
    """The listener's certificate: Envoy reads the files, and reads them again when something is moved into the folder."""
    return Secret(
        name=CERTIFICATE_NAME,
        tls_certificate=TlsCertificate(
            certificate_chain=DataSource(filename=str(folder / "tls.crt")),
            private_key=DataSource(filename=str(folder / "tls.key")),
            watched_directory=WatchedDirectory(path=str(folder)),
        ),
    )


def listener(settings: ListenerSettings) -> Listener:
    """The listener for clients."""
    manager = Filter(name="envoy.filters.network.http_connection_manager", typed_config=pack(_connection_manager(settings)))
    return Listener(
        name=LISTENER_NAME,
        address=Address(socket_address=SocketAddress(address=settings.host, port_value=settings.port)),
        filter_chains=[FilterChain(filters=[manager], transport_socket=None if settings.tls is None else _tls())],
        # With it, a second Envoy on the same port would not fail to bind but silently take a share of the connections.
        enable_reuse_port=BoolValue(value=False),
    )


def _tls() -> TransportSocket:
    common = CommonTlsContext(
        alpn_protocols=["h2", "http/1.1"],
        tls_params=TlsParameters(tls_minimum_protocol_version=TlsParameters.TLSv1_2),
        tls_certificate_sds_secret_configs=[SdsSecretConfig(name=CERTIFICATE_NAME, sds_config=ADS)],
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=pack(DownstreamTlsContext(common_tls_context=common)))


def _connection_manager(settings: ListenerSettings) -> HttpConnectionManager:
    return HttpConnectionManager(
        stat_prefix=LISTENER_NAME,
        rds=Rds(config_source=ADS, route_config_name=ROUTE_NAME),
        http_filters=[
            *filters(settings.fail_open),
            HttpFilter(name="envoy.filters.http.router", typed_config=pack(Router(suppress_envoy_headers=True))),
        ],
        early_header_mutation_extensions=[_without_control_headers()],
        # The client's address is the connection's. Without `internal_address_config` (an empty one means private networks)
        # nobody's `x-envoy-*` headers are obeyed, and the request id is always Envoy's: bookings are found by it, so no two
        # requests may share one.
        use_remote_address=BoolValue(value=True),
        always_set_request_id_in_response=True,
        normalize_path=BoolValue(value=True),
        merge_slashes=True,
        request_headers_timeout=timedelta(seconds=10),
        stream_idle_timeout=IDLE_TIMEOUT,
        local_reply_config=local_replies(),
        tracing=None if settings.traces is None else tracing(settings.traces),
        access_log=[_access_log(), _ends()],
    )


def _extension(name: str, config: Message) -> TypedExtensionConfig:
    return TypedExtensionConfig(name=name, typed_config=pack(config))


def _without_control_headers() -> TypedExtensionConfig:
    """Runs before the route is chosen and before the picker sees the request, so that nothing forged gets anywhere."""
    mutations = [Mutation(remove=name) for name in headers.CONTROL_HEADERS]
    return _extension("envoy.http.early_header_mutation.header_mutation", HeaderMutation(mutations=mutations))


def _access_log() -> AccessLog:
    fields = Struct()
    fields.update(ACCESS_LOG)
    return AccessLog(
        name="envoy.access_loggers.stdout",
        typed_config=pack(StdoutAccessLog(log_format=SubstitutionFormatString(json_format=fields))),
    )


def _ends() -> AccessLog:
    """Tells the gateway of the end of each request that it has sent to a replica. What cannot be told is dropped."""
    named = MetadataMatcher(
        filter=headers.LOG_NAMESPACE,
        path=[MetadataMatcher.PathSegment(key=headers.BOOKING)],
        value=ValueMatcher(present_match=True),
    )
    config = HttpGrpcAccessLogConfig(
        common_config=CommonGrpcAccessLogConfig(
            log_name=LISTENER_NAME,
            grpc_service=picker(),  # ends go where picks go, also when a gateway has just died
            transport_api_version=ApiVersion.V3,
            buffer_flush_interval=ENDS_EVERY,
        )
    )
    return AccessLog(
        name="envoy.access_loggers.http_grpc",
        filter=AccessLogFilter(metadata_filter=MetadataFilter(matcher=named, match_if_key_not_found=BoolValue(value=False))),
        typed_config=pack(config),
    )
