"""The route: to the cluster that the picker named, trying the picker's next destination where nothing has been done yet."""

from datetime import timedelta

from google.protobuf.wrappers_pb2 import UInt32Value, UInt64Value

from penstock.api import headers
from penstock.gateway._pb.envoy.config.route.v3.route_components_pb2 import (
    HeaderMatcher,
    RetryPolicy,
    Route,
    RouteAction,
    RouteMatch,
    VirtualHost,
)
from penstock.gateway._pb.envoy.config.route.v3.route_pb2 import RouteConfiguration
from penstock.gateway._pb.envoy.extensions.retry.host.previous_hosts.v3.previous_hosts_pb2 import PreviousHostsPredicate
from penstock.gateway._pb.envoy.type.matcher.v3.string_pb2 import StringMatcher
from penstock.gateway.xds.anys import pack
from penstock.gateway.xds.asking import turned_on
from penstock.prompt.processor import PROMPT_PATHS

ROUTE_NAME = "penstock"
MAX_BODY_BYTES = 32 * 1024 * 1024
"""What Envoy keeps of a request to send it again; larger ones are served, but not retried."""
RETRIES = 3
IDLE_TIMEOUT = timedelta(hours=1)
"""An answer that is not streamed is silent while it is computed."""
HOLD_MARGIN = timedelta(minutes=1)
SERVED_PATHS = (*PROMPT_PATHS, "/v1/models")
"""What goes to a replica without a picker's word: engines have other paths, which are not for clients."""

# Only where the engine has done nothing: it could not be reached, the request never left, or it said so. Not `reset`: a request
# that kills its replica would be passed on to the next.
RETRY_ON = "connect-failure,refused-stream,reset-before-request,retriable-headers"


def route_configuration(longest_hold_s: float, *, open_to: str | None = None) -> RouteConfiguration:
    """All models' route.

    Args:
        longest_hold_s: A held request is idle, so this bounds the idle timeout from below.
        open_to: The cluster of requests that no picker was asked about; None: there are none such.
    """
    idle_timeout = max(IDLE_TIMEOUT, timedelta(seconds=longest_hold_s) + HOLD_MARGIN)
    unasked = HeaderMatcher(name=headers.POOL, present_match=True, invert_match=True)
    # Until the picker has named a pool these match; its answer makes Envoy look again.
    routes = [
        _route(RouteMatch(path=path, headers=[unasked]), _action(idle_timeout, open_to))
        for path in (SERVED_PATHS if open_to is not None else ())
    ]
    routes.append(_route(RouteMatch(prefix="/"), _action(idle_timeout)))
    return RouteConfiguration(name=ROUTE_NAME, virtual_hosts=[VirtualHost(name=ROUTE_NAME, domains=["*"], routes=routes)])


def _action(idle_timeout: timedelta, cluster: str | None = None) -> RouteAction:
    """Return an action that routes to `cluster`, or to the cluster that the picker names if it is None."""
    return RouteAction(
        cluster=cluster,
        cluster_header=headers.POOL if cluster is None else None,
        timeout=timedelta(0),
        idle_timeout=idle_timeout,
        retry_policy=_retry_policy(),
        cluster_not_found_response_code=RouteAction.SERVICE_UNAVAILABLE,
    )


def _route(match: RouteMatch, action: RouteAction) -> Route:
    return Route(
        name=ROUTE_NAME,
        match=match,
        route=action,
        request_body_buffer_limit=UInt64Value(value=MAX_BODY_BYTES),
        typed_per_filter_config=turned_on(),
    )


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
