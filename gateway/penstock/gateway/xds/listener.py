"""The one listener: client headers cleaned, the picker asked, errors in OpenAI's JSON, one line of JSON a request in the log."""

from dataclasses import dataclass
from datetime import timedelta

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import BoolValue, UInt32Value

from penstock.api import headers
from penstock.gateway._pb.envoy.config.accesslog.v3.accesslog_pb2 import AccessLog
from penstock.gateway._pb.envoy.config.common.mutation_rules.v3.mutation_rules_pb2 import HeaderMutation as Mutation
from penstock.gateway._pb.envoy.config.core.v3.address_pb2 import Address, SocketAddress
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import RetryPolicy
from penstock.gateway._pb.envoy.config.core.v3.extension_pb2 import TypedExtensionConfig
from penstock.gateway._pb.envoy.config.core.v3.grpc_service_pb2 import GrpcService
from penstock.gateway._pb.envoy.config.core.v3.substitution_format_string_pb2 import SubstitutionFormatString
from penstock.gateway._pb.envoy.config.listener.v3.listener_components_pb2 import Filter, FilterChain
from penstock.gateway._pb.envoy.config.listener.v3.listener_pb2 import Listener
from penstock.gateway._pb.envoy.extensions.access_loggers.stream.v3.stream_pb2 import StdoutAccessLog
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.ext_proc_pb2 import ExternalProcessor, MetadataOptions
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.extensions.filters.http.router.v3.router_pb2 import Router
from penstock.gateway._pb.envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2 import (
    HttpConnectionManager,
    HttpFilter,
    Rds,
)
from penstock.gateway._pb.envoy.extensions.http.early_header_mutation.header_mutation.v3.header_mutation_pb2 import HeaderMutation
from penstock.gateway._pb.envoy.type.v3.http_status_pb2 import HttpStatus, StatusCode
from penstock.gateway.xds.anys import pack
from penstock.gateway.xds.bootstrap import GATEWAY_CLUSTER
from penstock.gateway.xds.clusters import ADS
from penstock.gateway.xds.replies import local_replies
from penstock.gateway.xds.routes import IDLE_TIMEOUT, PICKER_FILTER, ROUTE_NAME

LISTENER_NAME = "penstock"
PICKER_TIMEOUT = timedelta(seconds=10)
"""For a picker that hangs when response headers pass it. FULL_DUPLEX_STREAMED requests have no such limit: the picker owns the
deadlines of holding and picking."""

# What is logged of a request: how it was decided and what became of it, and nothing of what was asked (no query, no body).
ACCESS_LOG = {
    "time": "%START_TIME%",
    "request_id": f"%REQ({headers.REQUEST_ID})%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
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
    """Where Envoy listens for clients."""

    host: str
    port: int


def listener(settings: ListenerSettings) -> Listener:
    """The listener for clients."""
    manager = Filter(name="envoy.filters.network.http_connection_manager", typed_config=pack(_connection_manager()))
    return Listener(
        name=LISTENER_NAME,
        address=Address(socket_address=SocketAddress(address=settings.host, port_value=settings.port)),
        filter_chains=[FilterChain(filters=[manager])],
        # With it, a second Envoy on the same port would not fail to bind but silently take a share of the connections.
        enable_reuse_port=BoolValue(value=False),
    )


def _connection_manager() -> HttpConnectionManager:
    return HttpConnectionManager(
        stat_prefix=LISTENER_NAME,
        rds=Rds(config_source=ADS, route_config_name=ROUTE_NAME),
        http_filters=[
            # The route enables it: what is no HTTP has no route, and the answer to it would wait for the picker until the
            # connection is closed.
            HttpFilter(name=PICKER_FILTER, typed_config=pack(_picker()), disabled=True),
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
        access_log=[_access_log()],
    )


def _extension(name: str, config: Message) -> TypedExtensionConfig:
    return TypedExtensionConfig(name=name, typed_config=pack(config))


def _without_control_headers() -> TypedExtensionConfig:
    """Runs before the route is chosen and before the picker sees the request, so that nothing forged gets anywhere."""
    mutations = [Mutation(remove=name) for name in headers.CONTROL_HEADERS]
    return _extension("envoy.http.early_header_mutation.header_mutation", HeaderMutation(mutations=mutations))


def _picker() -> ExternalProcessor:
    return ExternalProcessor(
        grpc_service=GrpcService(
            envoy_grpc=GrpcService.EnvoyGrpc(cluster_name=GATEWAY_CLUSTER),
            # A request that a dying picker held is asked again (bodies to 64 KiB).
            retry_policy=RetryPolicy(retry_on="connect-failure,unavailable,reset", num_retries=UInt32Value(value=2)),
        ),
        processing_mode=ProcessingMode(
            request_header_mode=ProcessingMode.SEND,
            request_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED,
            request_trailer_mode=ProcessingMode.SEND,  # demanded by FULL_DUPLEX_STREAMED: trailers may end the body
            response_header_mode=ProcessingMode.SEND,
            response_body_mode=ProcessingMode.NONE,
            response_trailer_mode=ProcessingMode.SKIP,  # else a dying picker truncates running answers
        ),
        metadata_options=MetadataOptions(
            receiving_namespaces=MetadataOptions.MetadataNamespaces(untyped=[headers.METADATA_NAMESPACE]),
        ),
        response_attributes=["upstream.address", "xds.cluster_name", "response.code"],
        message_timeout=PICKER_TIMEOUT,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )


def _access_log() -> AccessLog:
    fields = Struct()
    fields.update(ACCESS_LOG)
    return AccessLog(
        name="envoy.access_loggers.stdout",
        typed_config=pack(StdoutAccessLog(log_format=SubstitutionFormatString(json_format=fields))),
    )
