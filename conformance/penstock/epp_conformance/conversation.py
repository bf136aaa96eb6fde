"""One ext_proc stream in a gateway's place: what it sends, and what comes back, every wait bounded."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterable

import grpc
from google.protobuf.struct_pb2 import Value
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - generated at import

from penstock.epp_conformance import protocol
from penstock.epp_conformance._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.epp_conformance._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from penstock.epp_conformance._pb.envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from penstock.epp_conformance.outcome import Outcome
from penstock.epp_conformance.target import Target
from penstock.epp_conformance.verdict import Failed

NONE, STREAMED, BUFFERED = ProcessingMode.NONE, ProcessingMode.STREAMED, ProcessingMode.BUFFERED
PARTIAL, DUPLEX = ProcessingMode.BUFFERED_PARTIAL, ProcessingMode.FULL_DUPLEX_STREAMED
PIECE = 60_000
"""Bytes of a body that one message carries."""

_numbers = itertools.count(1)

Hint = object
"""A subset hint: what JSON can say; the ellipsis for none."""


class Conversation:
    """One stream. Header names and messages are what Envoy would send."""

    def __init__(self, channel: grpc.aio.Channel, target: Target) -> None:
        self._target = target
        self._call = ExternalProcessorStub(channel).Process()
        self._came: asyncio.Queue[ProcessingResponse | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())
        self.sent: int | None = None
        """Bytes of request body sent; None where there was no message of a body."""
        self.ended: str | None = None
        """How the picker ended the stream: a gRPC status and its details; None while it is open."""

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not EOF:
                self._came.put_nowait(message)
        except grpc.aio.AioRpcError:
            pass  # the call's code says it too
        code = await self._call.code()
        details = await self._call.details()
        self.ended = f"{code.name}: {details}" if details else code.name
        self._came.put_nowait(None)

    # --- sending ---

    async def send(self, message: ProcessingRequest) -> None:
        """Sends one message; `Failed` where the picker has ended the stream with an error."""
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._call.write(message)
        except TimeoutError:
            raise Failed("the picker does not read what it is sent") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.wait([self._reader], timeout=self._target.timeout_s)
            if self.ended != "OK":
                raise Failed(f"the picker ended the stream with {self.ended}") from None

    async def headers(
        self,
        *,
        mode: int | None = DUPLEX,
        response_mode: int = NONE,
        ends: bool = False,
        method: str = "POST",
        path: str | None = None,
        more: Iterable[tuple[str, str | bytes]] = (),
        hint: Hint = ...,
        observe: bool = False,
        ahead: bool = False,
    ) -> None:
        """Sends request headers.

        Args:
            mode: Request body mode; None to send no `protocol_config` at all.
            response_mode: Response body mode.
            ends: The request has no body.
            path: The target's by default.
            more: Further headers.
            hint: Subset hint; none by default.
            observe: Observability mode.
            ahead: The body is sent without waiting for the answer to the headers.
        """
        message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=ends), observability_mode=observe)
        fields: list[tuple[str, str | bytes]] = [
            *((":method", method), (":scheme", "http"), (":authority", "models.example"), (":path", path or self._target.path)),
            *(("content-type", "application/json"), ("x-request-id", f"conformance-{next(_numbers)}")),
        ]
        _fill(message.request_headers, [*fields, *more])
        if mode is not None:
            config = ProtocolConfiguration(request_body_mode=mode, response_body_mode=response_mode)  # type: ignore[arg-type]
            config.send_body_without_waiting_for_header_response = ahead
            message.protocol_config.CopyFrom(config)
        add_hint(message, hint)
        await self.send(message)

    async def body(self, data: bytes, *, ends: bool = True, piece: int = PIECE, hint: Hint = ...) -> None:
        """Sends a body in messages of `piece` bytes, the hint on the last; `ends`: no trailers follow."""
        for at in range(0, max(len(data), 1), piece):
            last = at + piece >= len(data)
            message = ProcessingRequest(request_body=HttpBody(body=data[at : at + piece], end_of_stream=last and ends))
            if last:
                add_hint(message, hint)
            await self.send(message)
        self.sent = (self.sent or 0) + len(data)

    async def trailers(self) -> None:
        """Sends request trailers."""
        message = ProcessingRequest(request_trailers=HttpTrailers())
        message.request_trailers.trailers.headers.add(key="x-checksum", raw_value=b"none")
        await self.send(message)

    async def response_headers(self, *more: tuple[str, str], status: int = 200, served: str = "", ends: bool = False) -> None:
        """Sends response headers; `served` as metadata and as Envoy's attribute."""
        message = ProcessingRequest(response_headers=HttpHeaders(end_of_stream=ends))
        _fill(message.response_headers, [(":status", str(status)), *more])
        if served:
            namespace = message.metadata_context.filter_metadata[protocol.METADATA_NAMESPACE]
            namespace.update({protocol.DESTINATION_SERVED: served})
            message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
        await self.send(message)

    async def response_body(self, data: bytes, *, ends: bool = False) -> None:
        """Sends one message of the response's body."""
        await self.send(ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=ends)))

    async def response_trailers(self) -> None:
        """Sends response trailers."""
        await self.send(ProcessingRequest(response_trailers=HttpTrailers()))

    # --- receiving ---

    async def read(self, awaited: str) -> ProcessingResponse:
        """The next message; `Failed` where none comes."""
        try:
            async with asyncio.timeout(self._target.timeout_s):
                message = await self._came.get()
        except TimeoutError:
            raise Failed(f"no {awaited} within {self._target.timeout_s:g} s") from None
        if message is None:
            self._came.put_nowait(None)
            raise Failed(f"the picker ended the stream with {self.ended} instead of {awaited}")
        return message

    async def outcome(self, *, trailers: bool = False) -> Outcome:
        """What the picker makes of a complete FULL_DUPLEX_STREAMED request, or of one without a body."""
        outcome = Outcome()
        while not outcome.complete(self.sent, trailers):
            outcome.messages.append(await self.read(outcome.awaited(trailers)))
        return outcome

    async def quiet(self, after: str) -> None:
        """Closes the sending side: nothing more may come until the picker ends the stream too, without an error."""
        await self._done_writing()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                message = await self._came.get()
        except TimeoutError:
            return  # it keeps the stream open, and another check says so
        if message is not None:
            raise Failed(f"after {after} came one more message: {message.WhichOneof('response')}")
        self._came.put_nowait(None)
        if self.ended != "OK":
            raise Failed(f"after {after} the picker ended the stream with {self.ended}")

    async def end(self) -> str:
        """Closes the sending side; the status with which the picker ends the stream."""
        await self._done_writing()
        done, _ = await asyncio.wait([self._reader], timeout=self._target.timeout_s)
        if not done:
            raise Failed("the picker keeps the stream open after its caller has closed it")
        return self.ended or ""

    async def _done_writing(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended already
            await self._call.done_writing()

    async def close(self) -> None:
        """Resets the stream."""
        self._call.cancel()
        await asyncio.wait([self._reader], timeout=1)
        self._reader.cancel()


def _fill(head: HttpHeaders, fields: Iterable[tuple[str, str | bytes]]) -> None:
    for name, value in fields:
        head.headers.headers.add(key=name, raw_value=value.encode() if isinstance(value, str) else value)


def add_hint(message: ProcessingRequest, hint: Hint) -> None:
    """Puts a subset hint where gateways put it; none for the ellipsis."""
    if hint is ...:
        return
    fields = message.metadata_context.filter_metadata[protocol.SUBSET_NAMESPACE].fields
    fields[protocol.SUBSET].CopyFrom(_value(hint))


def _value(hint: Hint) -> Value:
    value = Value()
    match hint:
        case None:
            value.null_value = 0  # type: ignore[assignment] - an enum of one
        case str():
            value.string_value = hint
        case int() | float():
            value.number_value = hint
        case list():
            value.list_value.extend(hint)
        case _:
            value.struct_value.update(hint)  # type: ignore[arg-type]
    return value
