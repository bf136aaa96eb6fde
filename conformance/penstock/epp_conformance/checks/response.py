"""The response phase. A picker that wants nothing of it closes the stream after the request, without an error."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.epp_conformance._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import EXT_PROC, MODES, PRACTICE, PROTOCOL, Group, Level, check
from penstock.epp_conformance.conversation import BUFFERED, DUPLEX, NONE, STREAMED, Conversation
from penstock.epp_conformance.verdict import Failed, NotApplicable, expect

EVENTS = [b'data: {"n": %d}\n\n' % number for number in range(5)]
SSE = ("content-type", "text/event-stream")
MAX_CHUNK = 64 * 1024


@asynccontextmanager
async def _responding(
    bench: Bench, response_mode: int, status: int = 200, served: str = "", ends: bool = False
) -> AsyncIterator[Conversation]:
    """A stream whose response headers were answered."""
    async with bench.stream() as stream:
        await stream.headers(response_mode=response_mode)
        await stream.body(bench.target.body())
        (await stream.outcome()).picked()
        await stream.response_headers(SSE, status=status, served=served, ends=ends)
        answer = await _answer(stream, "response headers")
        kind = answer.WhichOneof("response")
        expect(kind == "response_headers", f"the response headers are answered by {kind}")
        yield stream


async def _answer(stream: Conversation, what: str) -> ProcessingResponse:
    try:
        return await stream.read(f"answer to the {what}")
    except Failed:
        if stream.ended == "OK":
            raise NotApplicable(f"the picker closes the stream before it answers the {what}, as it may") from None
        raise


@check("response-headers", Level.MUST, EXT_PROC)
async def head(bench: Bench) -> None:
    """Response headers are answered, or the stream is closed before without an error."""
    async with _responding(bench, NONE):
        pass


@check("response-without-body", Level.MUST, EXT_PROC)
async def without_body(bench: Bench) -> None:
    """Response headers that end the response are answered like others."""
    async with _responding(bench, NONE, ends=True):
        pass


@check("response-error-status", Level.MUST, EXT_PROC)
async def error_status(bench: Bench) -> None:
    """Errors of a model server pass: their headers are answered like others."""
    for status in (404, 429, 500, 503):
        async with _responding(bench, NONE, status=status):
            pass


@check("response-served", Level.MUST, PROTOCOL)
async def served(bench: Bench) -> None:
    """The endpoint that really answered comes as metadata; one that was not picked, or is not known, breaks nothing."""
    for endpoint in (*bench.target.endpoints[:2], "192.0.2.1:9", "garbage"):
        async with _responding(bench, NONE, served=endpoint):
            pass


@check("response-duplex", Level.MUST, MODES)
async def duplex(bench: Bench) -> None:
    """FULL_DUPLEX_STREAMED: the response's body is sent again in `streamed_response`s, whole and to its end."""
    async with _responding(bench, DUPLEX) as stream:
        back, ended = b"", False
        for event in EVENTS:
            await stream.response_body(event, ends=event is EVENTS[-1])
        while not ended and len(back) < len(b"".join(EVENTS)):
            answer = await _answer(stream, "response body")
            mutation = answer.response_body.response.body_mutation
            expect(
                mutation.WhichOneof("mutation") == "streamed_response", f"a chunk is answered by {answer.WhichOneof('response')}"
            )
            back += mutation.streamed_response.body
            ended = mutation.streamed_response.end_of_stream
    expect(back == b"".join(EVENTS), f"{len(b''.join(EVENTS))} bytes of events go on as {len(back)} others")
    expect(ended, "no chunk has end_of_stream")


@check("response-events-pass", Level.SHOULD, PRACTICE)
async def events_pass(bench: Bench) -> None:
    """FULL_DUPLEX_STREAMED: an event of a stream is passed on before the next one comes."""
    async with _responding(bench, DUPLEX) as stream:
        for event in EVENTS[:-1]:
            await stream.response_body(event)
            answer = await _answer(stream, "event, before the next one comes")
            expect(answer.WhichOneof("response") == "response_body", f"an event is answered by {answer.WhichOneof('response')}")


@check("response-chunk-size", Level.SHOULD, MODES)
async def chunk_size(bench: Bench) -> None:
    """FULL_DUPLEX_STREAMED: no chunk of the response is larger than 64 KiB, however large it came."""
    sent = b"x" * 300_000
    async with _responding(bench, DUPLEX) as stream:
        await stream.response_body(sent, ends=True)
        back = 0
        while back < len(sent):
            chunk = (await _answer(stream, "response body")).response_body.response.body_mutation.streamed_response
            expect(0 < len(chunk.body) <= MAX_CHUNK, f"a chunk has {len(chunk.body)} bytes")
            back += len(chunk.body)


@check("response-trailers", Level.MUST, EXT_PROC)
async def trailers(bench: Bench) -> None:
    """Response trailers are answered, after the body."""
    async with _responding(bench, DUPLEX) as stream:
        await stream.response_body(EVENTS[0])
        await stream.response_trailers()
        kind = "response_body"
        while kind == "response_body":
            kind = (await _answer(stream, "response trailers")).WhichOneof("response")
    expect(kind == "response_trailers", f"the trailers are answered by {kind}")


async def _one_each(bench: Bench, mode: int, chunks: list[bytes]) -> None:
    async with _responding(bench, mode) as stream:
        for chunk in chunks:
            await stream.response_body(chunk, ends=chunk is chunks[-1])
            answer = await _answer(stream, "response body")
            expect(answer.WhichOneof("response") == "response_body", f"a chunk is answered by {answer.WhichOneof('response')}")
            mutation = answer.response_body.response.body_mutation.WhichOneof("mutation")
            expect(mutation != "streamed_response", "a chunk is answered by a streamed_response, which is for duplex alone")
        await stream.quiet("the response")


@check("response-streamed", Level.SHOULD, MODES)
async def streamed(bench: Bench) -> None:
    """STREAMED: each chunk of the response has exactly one answer, without `streamed_response`."""
    await _one_each(bench, STREAMED, EVENTS)


@check("response-buffered", Level.SHOULD, MODES)
async def buffered(bench: Bench) -> None:
    """BUFFERED: the response's body has exactly one answer, without `streamed_response`."""
    await _one_each(bench, BUFFERED, [b"".join(EVENTS)])


GROUP = Group(
    "response",
    "The response phase",
    (
        *(head, without_body, error_status, served, duplex, events_pass, chunk_size, trailers),
        *(streamed, buffered),
    ),
)
