"""Envoy's access log over gRPC (ALS). It tells the gateway when requests end whose engines report no ends.

It is not on the path of requests: Envoy sends finished requests a few times per second, and drops them if the gateway does not
read. A lost entry only makes a booking end late.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import grpc

from penstock.api import headers
from penstock.gateway._pb.envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2_grpc import AccessLogServiceServicer
from penstock.gateway.extproc.call import Routed
from penstock.gateway.extproc.underway import Underway

MISDIRECTED_S = 1.0
"""How long a stream may bring another gateway's requests before it is ended."""
HEAD_S = 1.0
"""How far the head of a response may be behind its end: they come on connections of their own."""


class AccessLogService(AccessLogServiceServicer):
    """`envoy.service.accesslog.v3.AccessLogService`: one stream for each thread of Envoy.

    Args:
        underway: The requests in flight.
        over: Called for each of them that ends, with Envoy's entry.
    """

    def __init__(self, underway: Underway, over: Callable[[Routed, HTTPAccessLogEntry], None]) -> None:
        self._underway = underway
        self._over = over
        self._leaving = False

    def leave(self) -> None:
        """Another gateway takes over: a stream is ended as soon as it tells of what that one has picked."""
        self._leaving = True

    async def StreamAccessLogs(
        self, request_iterator: AsyncIterator[StreamAccessLogsMessage], context: grpc.aio.ServicerContext
    ) -> StreamAccessLogsResponse:
        """Takes in what has ended, until Envoy or this gateway ends the stream.

        After a failover and back Envoy would go on telling the standby. The new stream that it opens when this one is ended goes
        to the first gateway that is ready.
        """
        began = time.monotonic()
        async for message in request_iterator:
            ours = [self._end(name, entry) for name, entry in ended(message)]
            if not all(ours) and (self._leaving or time.monotonic() - began >= MISDIRECTED_S):
                break
        return StreamAccessLogsResponse()

    def _end(self, name: str, entry: HTTPAccessLogEntry) -> bool:
        if entry.response.response_code.value and self._underway.unanswered(name):
            asyncio.get_running_loop().call_later(HEAD_S, self._settle, name, entry)
        else:
            self._settle(name, entry)
        return self._underway.ours(name)

    def _settle(self, name: str, entry: HTTPAccessLogEntry) -> None:
        routed = self._underway.ended(name)
        if routed is not None:
            self._over(routed, entry)


def ended(message: StreamAccessLogsMessage) -> Iterator[tuple[str, HTTPAccessLogEntry]]:
    """Yield the finished requests and their names. Entries without a name are not ours."""
    for entry in message.http_logs.log_entry:
        noted = entry.common_properties.metadata.filter_metadata
        if headers.LOG_NAMESPACE in noted:
            name = noted[headers.LOG_NAMESPACE].fields[headers.BOOKING].string_value
            if name:
                yield name, entry
