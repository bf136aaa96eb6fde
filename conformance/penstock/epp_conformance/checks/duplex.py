"""FULL_DUPLEX_STREAMED, the body mode that the endpoint-picker protocol requires."""

import orjson

from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import EXT_PROC, MODES, PROTOCOL, Group, Level, check
from penstock.epp_conformance.outcome import Outcome
from penstock.epp_conformance.verdict import Failed, NotApplicable, expect

MAX_CHUNK = 64 * 1024
MEGABYTE = 1_000_000


@check("duplex-pick", Level.MUST, PROTOCOL)
async def pick(bench: Bench) -> None:
    """A complete request is answered with a destination."""
    (await bench.ask()).picked()


@check("duplex-headers-first", Level.MUST, EXT_PROC)
async def headers_first(bench: Bench) -> None:
    """The answer to the headers comes before the first chunk of the body."""
    kinds = (await bench.ask()).kinds()
    expect(kinds[0] == "request_headers", f"the first answer is {kinds[0]}")


@check("duplex-streamed-response", Level.MUST, EXT_PROC)
async def streamed_response(bench: Bench) -> None:
    """Every answer to the body is a `streamed_response`; Envoy takes any other for a spurious message."""
    outcome = await bench.ask()
    outcome.picked()
    answers = outcome.of("request_body")
    expect(answers, "the body is not answered")
    other = [a.request_body.response.body_mutation.WhichOneof("mutation") for a in answers]
    expect(len(outcome.chunks) == len(answers), f"the body's answers carry {other}")


async def _sent_again(bench: Bench, body: bytes, piece: int = 60_000, pieces: tuple[bytes, ...] = ()) -> bytes:
    """What goes on of a body; `Failed` where it is another JSON."""
    async with bench.stream() as stream:
        await stream.headers()
        if pieces:
            for number, each in enumerate(pieces):
                await stream.body(each, ends=number == len(pieces) - 1)
        else:
            await stream.body(body, piece=piece)
        outcome = await stream.outcome()
    outcome.picked()
    same = outcome.body == body or _json(outcome.body) == _json(body)
    expect(same, f"{len(body)} bytes were sent, and {len(outcome.body)} others go on")
    return outcome.body


async def _with_trailers(bench: Bench) -> Outcome:
    """A picked answer to a body that trailers end."""
    async with bench.stream() as stream:
        await stream.headers()
        await stream.body(bench.target.body(), ends=False)
        await stream.trailers()
        outcome = await stream.outcome(trailers=True)
    outcome.picked()
    return outcome


def _json(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Failed(f"what goes on of the body, {len(body)} bytes, is no JSON") from None


@check("duplex-whole-body", Level.MUST, EXT_PROC)
async def whole_body(bench: Bench) -> None:
    """The whole body is sent again: what is not, never reaches the model server."""
    await _sent_again(bench, bench.target.body())


@check("duplex-same-bytes", Level.SHOULD, EXT_PROC)
async def same_bytes(bench: Bench) -> None:
    """A body that the picker does not mean to change goes on byte for byte."""
    body = b" " + bench.target.body(user="caf\u00e9").replace(b",", b" ,\n")
    expect(await _sent_again(bench, body) == body, "the same JSON goes on in other bytes")


@check("duplex-small-pieces", Level.MUST, EXT_PROC)
async def small_pieces(bench: Bench) -> None:
    """A body may come in any number of messages, cut anywhere, inside of characters too."""
    await _sent_again(bench, bench.target.body(user="caf\u00e9 \U0001f600"), piece=1)


@check("duplex-empty-last-message", Level.MUST, EXT_PROC)
async def empty_last(bench: Bench) -> None:
    """The message that ends the body may be empty."""
    body = bench.target.body()
    await _sent_again(bench, body, pieces=(body, b""))


@check("duplex-chunk-size", Level.MUST, EXT_PROC)
async def chunk_size(bench: Bench) -> None:
    """No chunk is larger than 64 KiB."""
    outcome = await bench.ask(bench.target.body(prompt="hello " * 50_000))
    outcome.picked()
    if not outcome.chunks:
        raise NotApplicable("the body does not come back in chunks")
    largest = max(len(body) for body, _ in outcome.chunks)
    expect(largest <= MAX_CHUNK, f"a chunk has {largest} bytes")


@check("duplex-body-1mb", Level.MUST, PROTOCOL)
async def one_megabyte(bench: Bench) -> None:
    """A body of a megabyte is served: long prompts are what the protocol is for."""
    await _sent_again(bench, bench.target.body(prompt="x" * MEGABYTE))


@check("duplex-body-20mb", Level.SHOULD, PROTOCOL)
async def twenty_megabytes(bench: Bench) -> None:
    """A body of 20 MB, as images make them, is served."""
    await _sent_again(bench, bench.target.body(prompt="x" * (20 * MEGABYTE)))


@check("duplex-end-of-stream", Level.MUST, EXT_PROC)
async def end_of_stream(bench: Bench) -> None:
    """The last chunk, and no other, has `end_of_stream` when the body ended the request."""
    body = bench.target.body(prompt="hello " * 50_000)
    outcome = await bench.ask(body)
    outcome.picked()
    expect(_json(outcome.body) == _json(body), f"the end comes after {len(outcome.body)} of {len(body)} bytes")
    ends = [end for _, end in outcome.chunks]
    expect(ends and ends == [False] * (len(ends) - 1) + [True], f"end_of_stream of the {len(ends)} chunks: {ends}")


@check("duplex-trailers", Level.MUST, EXT_PROC)
async def trailers(bench: Bench) -> None:
    """Trailers end a body if no message has `end_of_stream`."""
    outcome = await _with_trailers(bench)
    expect(_json(outcome.body) == _json(bench.target.body()), "another body goes on")
    expect(outcome.kinds()[-1] == "request_trailers", f"the trailers are not answered last: {outcome.kinds()}")


@check("duplex-trailers-no-end-of-stream", Level.MUST, EXT_PROC)
async def trailers_no_end(bench: Bench) -> None:
    """Where trailers follow, no chunk has `end_of_stream`."""
    outcome = await _with_trailers(bench)
    if not outcome.chunks:
        raise NotApplicable("the body does not come back in chunks")
    expect(not any(end for _, end in outcome.chunks), "a chunk says that it is the last, and trailers come after it")


@check("duplex-duplicate-end", Level.MUST, "Envoy issue 46237 (1.35 to 1.37)")
async def duplicate_end(bench: Bench) -> None:
    """A last message that is delivered twice is answered once."""
    body = bench.target.body()
    async with bench.stream() as stream:
        await stream.headers()
        await stream.body(body)
        (await stream.outcome()).picked()
        await stream.body(body[-10:])
        await stream.quiet("a duplicate of the last message")


@check("duplex-nothing-twice", Level.MUST, EXT_PROC)
async def nothing_twice(bench: Bench) -> None:
    """After the last chunk, the picker sends nothing until the response."""
    async with bench.stream() as stream:
        await stream.headers()
        await stream.body(bench.target.body())
        (await stream.outcome()).picked()
        await stream.quiet("the last chunk")


@check("duplex-empty-body", Level.MUST, EXT_PROC)
async def empty_body(bench: Bench) -> None:
    """An empty body, ended by an empty message, is decided too: refused, or sent on as one empty chunk."""
    outcome = await bench.ask(b"")
    if outcome.immediate is None:
        outcome.picked()
        expect(outcome.chunks == [(b"", True)], f"an empty body goes on as {outcome.chunks}")


@check("duplex-trailers-alone", Level.MUST, EXT_PROC)
async def trailers_alone(bench: Bench) -> None:
    """Trailers may follow headers at once; the request is decided, and does not hang."""
    async with bench.stream() as stream:
        await stream.headers()
        await stream.trailers()
        await stream.outcome(trailers=True)


@check("no-protocol-config", Level.MUST, MODES)
async def no_protocol_config(bench: Bench) -> None:
    """A caller that does not state its modes (Envoy before 1.32, others) is served in FULL_DUPLEX_STREAMED."""
    outcome = await bench.ask(mode=None)
    outcome.picked()
    expect(outcome.chunks and outcome.chunks[-1][1], "the body does not come back in streamed chunks to an end")


GROUP = Group(
    "duplex",
    "FULL_DUPLEX_STREAMED requests",
    (
        *(pick, headers_first, streamed_response, whole_body, same_bytes, small_pieces, empty_last, chunk_size),
        *(one_megabyte, twenty_megabytes, end_of_stream, trailers, trailers_no_end, duplicate_end, nothing_twice),
        *(empty_body, trailers_alone, no_protocol_config),
    ),
)
