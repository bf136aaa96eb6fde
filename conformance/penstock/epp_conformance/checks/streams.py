"""Many streams, short streams, strange streams: what one request does never harms another."""

import asyncio
from typing import Any

import grpc
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - generated at import

from penstock.epp_conformance._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.epp_conformance._pb.envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest
from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import EXT_PROC, GRPC, MODES, PRACTICE, Group, Level, check
from penstock.epp_conformance.verdict import Failed, expect

AT_ONCE = 100


async def _serves(bench: Bench, after: str) -> None:
    outcome = await bench.ask()
    expect(outcome.immediate is None, f"after {after} requests are refused")
    outcome.picked()


async def _status(bench: Bench, call: Any, *messages: bytes) -> grpc.StatusCode | None:
    """With what the picker ends a call of these messages; None where it answers. `Failed` where it does neither."""
    try:
        async with asyncio.timeout(bench.target.timeout_s):
            for message in messages:
                await call.write(message)
            return await call.code() if await call.read() is EOF else None
    except TimeoutError:
        raise Failed("the picker neither answers the call nor ends it") from None
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()


@check("stream-ends", Level.MUST, EXT_PROC)
async def ends(bench: Bench) -> None:
    """A stream that its caller closes after the request ends without an error."""
    async with bench.stream() as stream:
        await stream.headers()
        await stream.body(bench.target.body())
        (await stream.outcome()).picked()
        status = await stream.end()
    expect(status == "OK", f"the picker ended it with {status}")


@check("stream-reset", Level.MUST, EXT_PROC)
async def reset(bench: Bench) -> None:
    """Clients that leave in the middle of a request do no harm."""
    for _ in range(20):
        async with bench.stream() as stream:
            await stream.headers()
            await stream.body(bench.target.body(), ends=False)
    await _serves(bench, "20 streams that were reset")


@check("stream-reset-in-response", Level.MUST, EXT_PROC)
async def reset_in_response(bench: Bench) -> None:
    """Clients that leave in the middle of a response do no harm."""
    for _ in range(5):
        async with bench.stream() as stream:
            await stream.headers()
            await stream.body(bench.target.body())
            await stream.outcome()
            await stream.response_headers(("content-type", "text/event-stream"))
    await _serves(bench, "5 streams that were reset")


@check("stream-concurrent", Level.MUST, EXT_PROC)
async def concurrent(bench: Bench) -> None:
    """A hundred requests at once are all served, each with its own body."""

    async def one(number: int) -> bool:
        body = bench.target.body(user=f"user-{number}")
        outcome = await bench.ask(body)
        outcome.picked()
        return b"user-%d" % number in outcome.body

    own = await asyncio.gather(*(one(number) for number in range(AT_ONCE)))
    expect(all(own), f"{own.count(False)} of {AT_ONCE} got another body")


@check("stream-interleaved", Level.MUST, EXT_PROC)
async def interleaved(bench: Bench) -> None:
    """A request whose body comes slowly keeps no other from being served."""
    async with bench.stream() as slow:
        body = bench.target.body()
        await slow.headers()
        await slow.body(body[:10], ends=False)
        await _serves(bench, "the beginning of another request")
        await slow.body(body[10:])
        (await slow.outcome()).picked()


@check("stream-observability", Level.SHOULD, EXT_PROC)
async def observability(bench: Bench) -> None:
    """In observability mode nothing is answered."""
    async with bench.stream() as stream:
        await stream.headers(ends=True, method="GET", path="/v1/models", observe=True)
        await stream.quiet("a message in observability mode")


@check("stream-unknown-message", Level.SHOULD, EXT_PROC)
async def unknown_message(bench: Bench) -> None:
    """A message of a kind that the picker does not know keeps its stream from no end, and harms no other."""
    async with bench.stream() as stream:
        await stream.send(ProcessingRequest())
        await stream.end()
    await _serves(bench, "an unknown message")


@check("stream-unreadable-message", Level.SHOULD, GRPC)
async def unreadable_message(bench: Bench) -> None:
    """A message that is no protobuf ends its stream with an error of gRPC's, and harms no other."""
    status = await _status(bench, bench.call(), b"\xff\xff")
    expect(status is not None, "it is answered")
    expect(status is not grpc.StatusCode.OK, "the stream ends without an error")
    await _serves(bench, "an unreadable message")


@check("stream-compressed", Level.SHOULD, GRPC)
async def compressed(bench: Bench) -> None:
    """Compressed messages are read, or refused with UNIMPLEMENTED."""
    message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=True))
    for name, value in ((":method", "GET"), (":path", "/v1/models"), ("x-long-enough-to-compress", "a" * 1000)):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.protocol_config.request_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
    status = await _status(bench, bench.call(compression=grpc.Compression.Gzip), message.SerializeToString())
    expect(status in (None, grpc.StatusCode.UNIMPLEMENTED), f"the stream ends with {status}")
    await _serves(bench, "a compressed message")


@check("stream-unknown-method", Level.SHOULD, GRPC)
async def unknown_method(bench: Bench) -> None:
    """A method that does not exist is UNIMPLEMENTED, before any message comes."""
    status = await _status(bench, bench.call("/envoy.service.ext_proc.v3.ExternalProcessor/Nothing"))
    expect(status is grpc.StatusCode.UNIMPLEMENTED, f"the call ends with {status}")


@check("stream-out-of-order", Level.SHOULD, MODES)
async def out_of_order(bench: Bench) -> None:
    """A body without headers (a gateway that skips them) is never sent on in silence: the destination could not be named."""
    async with bench.stream() as stream:
        await stream.body(bench.target.body())
        try:
            kind = (await stream.read("refusal")).WhichOneof("response")
            expect(kind == "immediate_response", f"it is answered by {kind}")
        except Failed:
            if stream.ended in (None, "OK"):
                raise
    await _serves(bench, "a body without headers")


@check("stream-extra-fields", Level.MUST, EXT_PROC)
async def extra_fields(bench: Bench) -> None:
    """Attributes and metadata that the picker does not know are ignored."""
    async with bench.stream() as stream:
        message = ProcessingRequest()
        message.metadata_context.filter_metadata["com.example"].update({"a": [1, {"b": None}]})
        message.attributes["envoy.filters.http.ext_proc"].update({"request.path": "/", "source.port": 7})
        message.request_body.body = bench.target.body()
        message.request_body.end_of_stream = True
        await stream.headers()
        await stream.send(message)
        stream.sent = len(message.request_body.body)
        (await stream.outcome()).picked()


@check("stream-many", Level.SHOULD, PRACTICE)
async def many(bench: Bench) -> None:
    """Two hundred requests one after the other on one connection are all served."""
    for _ in range(200):
        (await bench.ask()).picked()


GROUP = Group(
    "streams",
    "Streams beside each other",
    (
        *(ends, reset, reset_in_response, concurrent, interleaved, observability, unknown_message, unreadable_message),
        *(compressed, unknown_method, out_of_order, extra_fields, many),
    ),
)
