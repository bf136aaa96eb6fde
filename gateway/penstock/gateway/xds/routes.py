"""The one route: to the cluster that the picker named, trying the picker's next destination where nothing has been done yet."""

from collections.abc import Iterable
from datetime import timedelta

from google.protobuf.wrappers_pb2 import UInt32Value, UInt64Value

from penstock.api import headers
from penstock.api.fleet import Model
from penstock.gateway._pb.envoy.config.route.v3.route_components_pb2 import (
    HeaderMatcher,
    RetryPolicy,
    Route,
    RouteAction,
    RouteMatch,
    VirtualHost,
)
from penstock.gateway._pb.envoy.config.route.v3.route_pb2 import RouteConfiguration
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.ext_proc_pb2 import ExtProcOverrides, ExtProcPerRoute
from penstock.gateway._pb.envoy.extensions.retry.host.previous_hosts.v3.previous_hosts_pb2 import PreviousHostsPredicate
from penstock.gateway._pb.envoy.type.matcher.v3.string_pb2 import StringMatcher
from penstock.gateway.xds.anys import pack

ROUTE_NAME = "penstock"
PICKER_FILTER = "envoy.filters.http.ext_proc"
"""The filter that asks the picker: off where the listener has it, on for this route."""
MAX_BODY_BYTES = 32 * 1024 * 1024
"""What Envoy keeps of a request to send it again; larger ones are served, but not retried."""
RETRIES = 3
IDLE_TIMEOUT = timedelta(hours=1)
"""An answer that is not streamed is silent for as long as it is computed."""
HOLD_MARGIN = timedelta(minutes=1)

# Only where the engine has done nothing: it could not be reached, the request never left, or it said so. Not `reset`: a request
# that kills its replica would be passed on to the next.
RETRY_ON = "connect-failure,refused-stream,reset-before-request,retriable-headers"


def route_configuration(models: Iterable[Model]) -> RouteConfiguration:
    """All models' route; a held request is idle, so the longest hold bounds the idle timeout from below."""
    longest_hold = timedelta(seconds=max((model.hold_timeout_s for model in models), default=0.0))
    action = RouteAction(
        cluster_header=headers.POOL,
        timeout=timedelta(0),
        idle_timeout=max(IDLE_TIMEOUT, longest_hold + HOLD_MARGIN),
        retry_policy=_retry_policy(),
        cluster_not_found_response_code=RouteAction.SERVICE_UNAVAILABLE,
    )
    route = Route(
        name=ROUTE_NAME,
        match=RouteMatch(prefix="/"),
        route=action,
        request_body_buffer_limit=UInt64Value(value=MAX_BODY_BYTES),
        typed_per_filter_config={PICKER_FILTER: pack(ExtProcPerRoute(overrides=ExtProcOverrides()))},
    )
    return RouteConfiguration(name=ROUTE_NAME, virtual_hosts=[VirtualHost(name=ROUTE_NAME, domains=["*"], routes=[route])])


def _retry_policy() -> RetryPolicy:
    retriable = HeaderMatcher(name=headers.RETRIABLE, string_match=StringMatcher(exact="true"))
    predicate = RetryPolicy.RetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts", typed_config=pack(PreviousHostsPredicate())
    )
    return RetryPolicy(
        retry_on=RETRY_ON,
        num_retries=UInt32Value(value=RETRIES),
        retriable_headers=[retriable],
        retry_host_predicate=[predicate],
        host_selection_retry_max_attempts=5,
        retry_back_off=RetryPolicy.RetryBackOff(
            base_interval=timedelta(milliseconds=5), max_interval=timedelta(milliseconds=100)
        ),
    )
