"""The filters that ask the picker and tell it, which routes turn on.

A request waits for the picker, and its response does not: two exchanges. The first is over when the request goes on, so that a
gateway that dies meanwhile takes no answer with it. The second shows the response's head to whichever gateway is ready, waits for
nothing, and is done without where none is. What the picker would add to the head Envoy knows itself: which replica has answered
from its endpoints, the rest from what the picker has noted on the first exchange.
"""

from collections.abc import Mapping
from datetime import timedelta

from google.protobuf.any_pb2 import Any
from google.protobuf.wrappers_pb2 import UInt32Value

from penstock.api import headers
from penstock.gateway._pb.envoy.config.common.mutation_rules.v3.mutation_rules_pb2 import HeaderMutation as Mutation
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption, RetryPolicy
from penstock.gateway._pb.envoy.config.core.v3.grpc_service_pb2 import GrpcService
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.ext_proc_pb2 import (
    ExternalProcessor,
    ExtProcOverrides,
    ExtProcPerRoute,
    HeaderForwardingRules,
    MetadataOptions,
)
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.extensions.filters.http.header_mutation.v3.header_mutation_pb2 import HeaderMutation, Mutations
from penstock.gateway._pb.envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2 import (
    HttpFilter,
)
from penstock.gateway._pb.envoy.extensions.retry.priority.previous_priorities.v3.previous_priorities_config_pb2 import (
    PreviousPrioritiesConfig,
)
from penstock.gateway._pb.envoy.type.matcher.v3.string_pb2 import ListStringMatcher, StringMatcher
from penstock.gateway._pb.envoy.type.v3.http_status_pb2 import HttpStatus, StatusCode
from penstock.gateway.extproc.call import READ
from penstock.gateway.xds.anys import pack
from penstock.gateway.xds.bootstrap import PICKER_CLUSTER

REQUEST_FILTER = "envoy.filters.http.ext_proc"
RESPONSE_FILTER = "penstock.response"
PICKER_TIMEOUT = timedelta(seconds=10)
"""FULL_DUPLEX_STREAMED requests have no such limit: the picker owns the deadlines of holding and picking."""
HOLD_LIMIT = timedelta(hours=1)
"""Limit for buffered bodies: longer than requests are held, which it would otherwise cut off."""
_NAMESPACES = MetadataOptions.MetadataNamespaces


def filters(fail_open: bool) -> list[HttpFilter]:
    """In the order of the request.

    Those that ask are off until a route turns them on: what is no HTTP has no route, and the answer to it would wait for the
    picker until the connection is closed.

    Args:
        fail_open: Requests go on where no picker can be asked: see `ListenerSettings`.
    """
    return [
        # Behind the others on the way back: the picker sees the report, the client does not, whoever was asked.
        HttpFilter(name="envoy.filters.http.header_mutation", typed_config=pack(_response_head())),
        HttpFilter(name=REQUEST_FILTER, typed_config=pack(_request_phase(fail_open)), disabled=True),
        HttpFilter(name=RESPONSE_FILTER, typed_config=pack(_response_phase()), disabled=True),
    ]


def turned_on() -> Mapping[str, Any]:
    """What a route says to the filters."""
    return {name: pack(ExtProcPerRoute(overrides=ExtProcOverrides())) for name in (REQUEST_FILTER, RESPONSE_FILTER)}


def _request_phase(fail_open: bool) -> ExternalProcessor:
    # FULL_DUPLEX_STREAMED never fails open: Envoy has given the body away. It demands trailers, since these may end the body.
    return ExternalProcessor(
        grpc_service=picker(HeaderValue(key=headers.PHASE, value=headers.REQUEST_PHASE)),
        processing_mode=ProcessingMode(
            request_header_mode=ProcessingMode.SEND,
            request_body_mode=ProcessingMode.BUFFERED if fail_open else ProcessingMode.FULL_DUPLEX_STREAMED,
            request_trailer_mode=ProcessingMode.SKIP if fail_open else ProcessingMode.SEND,
            response_header_mode=ProcessingMode.SKIP,
            response_trailer_mode=ProcessingMode.SKIP,
        ),
        metadata_options=MetadataOptions(
            receiving_namespaces=_NAMESPACES(untyped=[headers.METADATA_NAMESPACE, headers.LOG_NAMESPACE])
        ),
        forward_rules=_read(),
        message_timeout=HOLD_LIMIT if fail_open else PICKER_TIMEOUT,
        failure_mode_allow=fail_open,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )


def _response_phase() -> ExternalProcessor:
    return ExternalProcessor(
        grpc_service=picker(),
        observability_mode=True,
        processing_mode=ProcessingMode(
            request_header_mode=ProcessingMode.SKIP,
            response_header_mode=ProcessingMode.SEND,
            request_trailer_mode=ProcessingMode.SKIP,
            response_trailer_mode=ProcessingMode.SKIP,
        ),
        metadata_options=MetadataOptions(forwarding_namespaces=_NAMESPACES(untyped=[headers.LOG_NAMESPACE])),
        response_attributes=["upstream.address"],
        forward_rules=_read(),
        failure_mode_allow=True,
    )


def _read() -> HeaderForwardingRules:
    """What the picker does not look at, such as cookies, does not leave Envoy."""
    return HeaderForwardingRules(allowed_headers=ListStringMatcher(patterns=[StringMatcher(exact=name) for name in sorted(READ)]))


def picker(*metadata: HeaderValue) -> GrpcService:
    """Return the first gateway that is ready, called with `metadata`."""
    return GrpcService(
        initial_metadata=metadata,
        envoy_grpc=GrpcService.EnvoyGrpc(cluster_name=PICKER_CLUSTER),
        # What a dying picker held is asked again, of the standby where there is one (bodies to 64 KiB).
        retry_policy=RetryPolicy(
            retry_on="connect-failure,unavailable,reset",
            num_retries=UInt32Value(value=2),
            retry_priority=RetryPolicy.RetryPriority(
                name="envoy.retry_priorities.previous_priorities",
                typed_config=pack(PreviousPrioritiesConfig(update_frequency=1)),
            ),
        ),
    )


def _response_head() -> HeaderMutation:
    """Return the response headers that tell clients of the decision, and remove internal ones."""
    told = {
        headers.REPLICA: f"%UPSTREAM_METADATA({headers.LOG_NAMESPACE}:{headers.UID})%",
        headers.MODEL: f"%DYNAMIC_METADATA({headers.LOG_NAMESPACE}:{headers.NAME})%",
        headers.DECISION: f"%DYNAMIC_METADATA({headers.LOG_NAMESPACE}:{headers.REASONS})%",
    }
    mutations = [Mutation(remove=name) for name in (*headers.LOADS, *told)]  # a replica does not say it in Envoy's place
    mutations += [Mutation(append=_set(name, value)) for name, value in told.items()]  # where there is no value, nothing
    return HeaderMutation(mutations=Mutations(response_mutations=mutations))


def _set(name: str, value: str) -> HeaderValueOption:
    action = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return HeaderValueOption(header=HeaderValue(key=name, value=value), append_action=action)
