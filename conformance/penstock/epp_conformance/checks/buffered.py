"""The other body modes. The protocol requires none of them: a picker may refuse one, if it does so by an error of gRPC's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from penstock.epp_conformance import protocol
from penstock.epp_conformance._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.epp_conformance._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import EXT_PROC, MODES, Group, Level, check
from penstock.epp_conformance.conversation import BUFFERED, NONE, PARTIAL, STREAMED, Conversation
from penstock.epp_conformance.outcome import Outcome, Pick, sets_of
from penstock.epp_conformance.verdict import Failed, NotApplicable, expect


@asynccontextmanager
async def _buffered(bench: Bench) -> AsyncIterator[Conversation]:
    """A stream whose headers are answered and whose body may be sent."""
    async with bench.stream() as stream:
        await stream.headers(mode=BUFFERED)
        await _headers_answered(stream)
        yield stream


async def _headers_answered(stream: Conversation) -> ProcessingResponse:
    try:
        answer = await stream.read("answer to the request headers")
    except Failed:
        if _refuses(stream):
            raise NotApplicable(f"the picker refuses BUFFERED: {stream.ended}") from None
        raise
    expect(answer.WhichOneof("response") == "request_headers", f"the headers are answered by {answer.WhichOneof('response')}")
    return answer


def _refuses(stream: Conversation) -> bool:
    return stream.ended is not None and stream.ended.split(":")[0] in ("FAILED_PRECONDITION", "UNIMPLEMENTED", "INVALID_ARGUMENT")


async def _body_answer(stream: Conversation, body: bytes) -> tuple[ProcessingResponse, Pick]:
    await stream.body(body, piece=len(body))
    outcome = Outcome([await stream.read("answer to the request body")])
    return outcome.messages[0], outcome.picked("request_body")


@check("buffered-headers-at-once", Level.SHOULD, MODES)
async def headers_at_once(bench: Bench) -> None:
    """BUFFERED: the headers are answered at once, since the body is withheld until then."""
    async with _buffered(bench):
        pass


@check("buffered-pick-in-body-answer", Level.SHOULD, EXT_PROC)
async def pick_in_body(bench: Bench) -> None:
    """BUFFERED: the answer to the body carries the destination, as header and as metadata, and clears the route cache."""
    async with _buffered(bench) as stream:
        _, pick = await _body_answer(stream, bench.target.body())
    expect(pick.header is not None, f"{protocol.DESTINATION} is not set")
    expect(pick.metadata == pick.header, f"metadata says {pick.metadata}, the header {pick.header}")
    expect(pick.response.clear_route_cache, "clear_route_cache is not set")


@check("buffered-one-answer", Level.SHOULD, EXT_PROC)
async def one_answer(bench: Bench) -> None:
    """BUFFERED: the body has exactly one answer, without `streamed_response`."""
    async with _buffered(bench) as stream:
        answer, _ = await _body_answer(stream, bench.target.body())
        mutation = answer.request_body.response.body_mutation.WhichOneof("mutation")
        expect(mutation != "streamed_response", "the answer is a streamed_response")
        await stream.quiet("the answer to the body")


@check("buffered-content-length", Level.SHOULD, MODES)
async def content_length(bench: Bench) -> None:
    """BUFFERED: a picker that replaces the body sets `content-length` to its length; Envoy rejects the answer otherwise."""
    body = bench.target.body()
    async with _buffered(bench) as stream:
        answer, _ = await _body_answer(stream, body)
    common = answer.request_body.response
    length = sets_of(common).get("content-length")
    replaced = common.body_mutation.body if common.body_mutation.WhichOneof("mutation") == "body" else None
    if replaced is None:
        expect(length in (None, str(len(body))), f"the body is not replaced, and content-length becomes {length}")
    else:
        expect(length == str(len(replaced)), f"a body of {len(replaced)} bytes has content-length {length}")


@check("buffered-large-body", Level.SHOULD, MODES)
async def large_body(bench: Bench) -> None:
    """BUFFERED: a body of 5 MB, one message, is served (gRPC's own limit is 4 MiB)."""
    async with _buffered(bench) as stream:
        await _body_answer(stream, bench.target.body(prompt="x" * 5_000_000))


@check("buffered-duplicate-end", Level.SHOULD, "Envoy issue 46237 (1.35 to 1.37)")
async def duplicate_end(bench: Bench) -> None:
    """BUFFERED: a body that is delivered twice is answered once."""
    async with _buffered(bench) as stream:
        await _body_answer(stream, bench.target.body())
        await stream.body(bench.target.body())
        await stream.quiet("a duplicate of the body")


@check("buffered-trailers", Level.SHOULD, EXT_PROC)
async def trailers(bench: Bench) -> None:
    """BUFFERED: a body before trailers has no `end_of_stream`, and is complete; the trailers are answered too."""
    async with _buffered(bench) as stream:
        await stream.body(bench.target.body(), ends=False)
        Outcome([await stream.read("answer to the request body")]).picked("request_body")
        await stream.trailers()
        answer = await stream.read("answer to the request trailers")
    kind = answer.WhichOneof("response")
    expect(kind == "request_trailers", f"the trailers are answered by {kind}")


async def _served_or_refused(bench: Bench, mode: int) -> None:
    """The mode sends the request on before its body was answered: a pick comes with the headers, or never."""
    async with bench.stream() as stream:
        await stream.headers(mode=mode)
        try:
            answer = await stream.read("answer to the request headers")
        except Failed:
            if stream.ended is not None and stream.ended != "OK":
                return  # refused, which a gateway's operator sees
            raise
        if answer.mode_override.request_body_mode == ProcessingMode.BUFFERED:
            return
        outcome = Outcome([answer])
        if outcome.immediate is None:
            outcome.picked()


@check("mode-streamed", Level.SHOULD, MODES)
async def mode_streamed(bench: Bench) -> None:
    """STREAMED: the pick is in the answer to the headers, or the mode is refused; the request never goes on without one."""
    await _served_or_refused(bench, STREAMED)


@check("mode-streamed-ahead", Level.SHOULD, MODES)
async def streamed_ahead(bench: Bench) -> None:
    """STREAMED without waiting for the answer to the headers: that answer may wait for the body and name the destination; each
    chunk has one answer."""
    chunks = [bench.target.body()[:20], bench.target.body()[20:], b""]
    async with bench.stream() as stream:
        await stream.headers(mode=STREAMED, ahead=True)
        try:
            for chunk in chunks:
                await stream.body(chunk, ends=chunk is chunks[-1])
            answer = await stream.read("answer to the request headers")
        except Failed:
            if refusal := await _refusal_ahead(bench):
                raise NotApplicable(f"the picker refuses STREAMED: {refusal}") from None
            raise
        Outcome([answer]).picked()
        for _ in chunks:
            answer = await stream.read("answer to a chunk of the body")
            mutation = answer.request_body.response.body_mutation.WhichOneof("mutation")
            one = answer.WhichOneof("response") == "request_body" and mutation != "streamed_response"
            expect(one, f"a chunk is answered by {mutation or answer.WhichOneof('response')}")
        await stream.quiet("an answer to each chunk")


async def _refusal_ahead(bench: Bench) -> str | None:
    """How the picker refuses STREAMED; None where it does not. Asked with headers alone: gRPC's client may not learn why a stream
    ended that it was writing to."""
    async with bench.stream() as stream:
        await stream.headers(mode=STREAMED, ahead=True)
        with suppress(Failed):
            await stream.read("answer to the request headers")
        return stream.ended if _refuses(stream) else None


@check("mode-none", Level.SHOULD, MODES)
async def mode_none(bench: Bench) -> None:
    """NONE with a body: the pick is in the answer to the headers, or the mode is refused."""
    await _served_or_refused(bench, NONE)


@check("mode-buffered-partial", Level.SHOULD, MODES)
async def mode_partial(bench: Bench) -> None:
    """BUFFERED_PARTIAL: the pick is in the answer to the headers, or the mode is refused."""
    await _served_or_refused(bench, PARTIAL)


GROUP = Group(
    "modes",
    "Other request body modes",
    (
        *(headers_at_once, pick_in_body, one_answer, content_length, large_body, duplicate_end, trailers),
        *(mode_streamed, streamed_ahead, mode_none, mode_partial),
    ),
)
