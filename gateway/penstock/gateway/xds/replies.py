"""Envoy's own errors in OpenAI's JSON.

The picker's immediate responses pass here too, and are left as they are.
"""

import json
from dataclasses import dataclass

from google.protobuf.wrappers_pb2 import UInt32Value

from penstock.api import headers
from penstock.api.errors import error_body
from penstock.gateway._pb.envoy.config.accesslog.v3.accesslog_pb2 import (
    AccessLogFilter,
    ExtensionFilter,
)
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import DataSource, HeaderValue, HeaderValueOption
from penstock.gateway._pb.envoy.config.core.v3.substitution_format_string_pb2 import SubstitutionFormatString
from penstock.gateway._pb.envoy.extensions.access_loggers.filters.cel.v3.cel_pb2 import ExpressionFilter
from penstock.gateway._pb.envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2 import (
    LocalReplyConfig,
    ResponseMapper,
)
from penstock.gateway.xds.anys import pack


@dataclass(frozen=True)
class Reply:
    """What a client reads when Envoy itself has to answer."""

    when: str
    """A CEL expression over Envoy's attributes; the first that holds decides."""
    message: str
    kind: str
    code: str
    retry: bool = False
    """Sending it again may help: a 503, whatever status Envoy would give, and `retry-after`."""


PICKER_FAILED = "response.code_details.startsWith('ext_proc_error')"
"""What Envoy notes when the picker is away or breaks the protocol."""
PICKER_ANSWERED = "!has(response.code_details) || response.code_details == '' || response.code_details.startsWith('penstock_')"
"""What it notes for an immediate response: the picker's own `details`."""

REPLIES = (
    Reply(
        PICKER_FAILED,
        "The gateway cannot choose a replica at the moment; try again.",
        "server_error",
        "gateway_unavailable",
        True,
    ),
    Reply(
        "response.code_details.startsWith('no_healthy_upstream')",
        "No replica of this model can take the request at the moment; try again.",
        "server_error",
        "no_ready_replica",
        True,
    ),
    Reply(
        # The second: its head was still with the picker when it died; Envoy calls that a 502.
        "response.code == 503 || response.code_details.startsWith('upstream_reset')",
        "The replica that was to answer failed before it did; try again.",
        "server_error",
        "replica_failed",
        True,
    ),
    Reply("response.code == 413", "The request's body is too large.", "invalid_request_error", "request_too_large"),
    Reply(
        "response.code >= 500", "The gateway could not get an answer: %RESPONSE_CODE_DETAILS%.", "server_error", "gateway_error"
    ),
    Reply("true", "The gateway refused the request: %RESPONSE_CODE_DETAILS%.", "invalid_request_error", "bad_request"),
)


def local_replies() -> LocalReplyConfig:
    """The mapping of every reply that Envoy makes up."""
    untouched = ResponseMapper(filter=_when(PICKER_ANSWERED))
    return LocalReplyConfig(mappers=[untouched, *(_mapper(reply) for reply in REPLIES)])


def _mapper(reply: Reply) -> ResponseMapper:
    text = json.dumps(error_body(reply.message, reply.kind, code=reply.code))
    return ResponseMapper(
        filter=_when(reply.when),
        status_code=UInt32Value(value=503) if reply.retry else None,
        body_format_override=SubstitutionFormatString(
            text_format_source=DataSource(inline_string=text), content_type="application/json"
        ),
        headers_to_add=[_header(headers.REASON, reply.code), *([_header("retry-after", "1")] if reply.retry else [])],
    )


def _header(key: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(header=HeaderValue(key=key, value=value), append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)


def _when(expression: str) -> AccessLogFilter:
    config = pack(ExpressionFilter(expression=expression))
    return AccessLogFilter(
        extension_filter=ExtensionFilter(name="envoy.access_loggers.extension_filters.cel", typed_config=config)
    )
