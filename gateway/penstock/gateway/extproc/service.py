"""The grpc.aio front end of the ext_proc state machine."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - generated at import

from penstock.api import headers
from penstock.api.tracing import TRACEPARENT
from penstock.gateway.extproc.ceiling import Ceiling
from penstock.gateway.extproc.exchange import Director, Exchange, HandedOver, UnsupportedMode
from penstock.gateway.extproc.whole import WholeExchanges
from penstock.gateway.extproc.wire import CompiledWire, Message, PlainWire, Wire, as_bytes
from penstock.gateway.h2.server import Server
from penstock.gateway.picker.choice import MAX_ENDPOINTS

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
LOOK_S = 0.02
"""How often one that stops looks whether its streams have ended: no stream need say so."""
_REQUEST_PHASE = (headers.PHASE, headers.REQUEST_PHASE)
HEARD_OUT_S = 30.0
"""How long a caller whose request was refused may go on sending it. Some lose the answer if the stream ends under their hands,
and a caller on a busy machine is slow."""
HEARD_BEFORE_S = 0.1
"""The same where the stream has to end with an error, which nothing can come before: half of what Envoy waits for an answer by
default."""

log = logging.getLogger(__name__)


class Registry(Protocol):
    """A gRPC server, of either kind."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the handlers of services."""
        ...


class ExtProcService:
    """`envoy.service.ext_proc.v3.ExternalProcessor`: one stream for each HTTP request. Arguments are those of `Exchange`, and
    whether `traceparent` is read."""

    def __init__(
        self,
        director: Director,
        destinations: int = MAX_ENDPOINTS,
        inference_pool: str | None = None,
        ceiling: Ceiling | None = None,
        *,
        traced: bool = False,
        wire: Wire | None = None,
    ) -> None:
        self.traced = traced
        self._wire = wire or PlainWire()
        self.director = director
        self.ceiling = ceiling or Ceiling()
        self._inference_pool = inference_pool
        self.destinations = destinations
        self.open = 0
        """Streams in progress."""

    async def idle(self) -> None:
        """Waits until no stream is in progress."""
        while self.open:  # noqa: ASYNC110 - an event would cost each stream, and only a process that stops asks
            await asyncio.sleep(LOOK_S)

    def add_to(self, server: Registry) -> None:
        """Has `server` serve this."""
        process = grpc.stream_stream_rpc_method_handler(
            self.Process, request_deserializer=self._wire.read, response_serializer=as_bytes
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: process}),))
        wire = self._wire
        if self._inference_pool is None and isinstance(wire, CompiledWire) and isinstance(server, Server) and server.compiled:
            server.shortcut = WholeExchanges(self, f"/{SERVICE}/{METHOD}", server.compiled, wire)

    async def Process(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        """See the protocol. A stream that the caller resets cancels this coroutine, wherever it waits."""
        metadata = context.invocation_metadata() or ()
        exchange = Exchange(
            self.director,
            self.destinations,
            self._inference_pool,
            self.ceiling,
            apart=self._inference_pool is None and _REQUEST_PHASE in metadata,
            traceparent=next((str(value) for key, value in metadata if key == TRACEPARENT), None) if self.traced else None,
            wire=self._wire,
        )
        self.open += 1
        try:
            while not exchange.over and (message := await context.read()) is not EOF:
                try:
                    said = await exchange.receive(message)
                except UnsupportedMode as error:
                    exchange.close()
                    if _goes_on(message):
                        await _hear_out(context, HEARD_BEFORE_S)
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
                except HandedOver as reason:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, str(reason))
                except Exception:
                    # A mistake of ours in one request must not look like a dead picker, which Envoy would retry.
                    log.exception("a request could not be decided")
                    said = [exchange.failed()]
                # Before the answers are sent: Envoy may have read them, and ended the stream, before `write` returns.
                exchange.told()
                for answer in said:
                    await context.write(answer)
                if exchange.over and _goes_on(message):
                    exchange.close()
                    await _hear_out(context, HEARD_OUT_S)
        except DecodeError as error:  # of grpc.aio's; the other server ends the call so by itself
            await context.abort(grpc.StatusCode.INTERNAL, f"the message is unreadable: {error}")
        finally:
            self.open -= 1
            exchange.close()


def _goes_on(message: Message) -> bool:
    """Whether more of the request follows."""
    return message.kind in ("request_headers", "request_body") and not message.ends


async def _hear_out(context: grpc.aio.ServicerContext, limit_s: float) -> None:
    """Lets the rest of a request come that is decided already."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while (message := await context.read()) is not EOF and _goes_on(message):
                pass
