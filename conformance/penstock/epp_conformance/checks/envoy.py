"""Checks through a real Envoy: what a client receives, and what a model server receives."""

import asyncio

import aiohttp
import orjson

from penstock.epp_conformance import protocol
from penstock.epp_conformance.backends import EVENTS
from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import EXT_PROC, HTTP2, MODES, PRACTICE, PROTOCOL, Group, Level, check
from penstock.epp_conformance.outcome import error_object
from penstock.epp_conformance.rig import Reply, Rig
from penstock.epp_conformance.verdict import Failed, NotApplicable, expect


async def _rig(bench: Bench) -> Rig:
    rig = bench.rig
    await rig.start()
    return rig


def _followed(reply: Reply) -> str:
    """Return the endpoint that answered. Raises `Failed` if the picker named another one first, or none."""
    named = reply.values(protocol.DESTINATION)
    expect(len(named) == 1, f"the backend sees {protocol.DESTINATION} {len(named)} times: {named}")
    first = named[0].split(",")[0].strip()
    expect(reply.endpoint == first, f"{first} was picked, and {reply.endpoint} answered")
    return reply.endpoint


async def _serves(bench: Bench, listener: str, body: bytes) -> None:
    reply = await (await _rig(bench)).ask(listener, body)
    _followed(reply)
    expect(reply.has_body(body), f"the backend got another body than the {len(body)} bytes that were sent")


@check("envoy-picked", Level.MUST, PROTOCOL)
async def picked(bench: Bench) -> None:
    """The picked endpoint answers, and gets the body that was sent."""
    for _ in range(5):
        await _serves(bench, "duplex", bench.target.body())


@check("envoy-large-body", Level.MUST, EXT_PROC)
async def large_body(bench: Bench) -> None:
    """A body of 5 MB arrives whole."""
    await _serves(bench, "duplex", bench.target.body(prompt="x" * 5_000_000))


@check("envoy-bodyless", Level.MUST, EXT_PROC)
async def bodyless(bench: Bench) -> None:
    """`GET /v1/models` is answered, by a backend or by the picker."""
    reply = await (await _rig(bench)).ask("duplex", method="GET", path="/v1/models")
    expect(reply.status == 200, f"the status is {reply.status}: {reply.body[:120]!r}")


@check("envoy-trailers", Level.MUST, EXT_PROC)
async def trailers(bench: Bench) -> None:
    """A request with trailers is served."""
    rig = await _rig(bench)
    body = bench.target.body()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.ports["duplex"])
    head = f"POST {bench.target.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    chunk = b"%x\r\n%s\r\n0\r\nx-checksum: none\r\n\r\n" % (len(body), body)
    writer.write(head.encode() + b"transfer-encoding: chunked\r\ntrailer: x-checksum\r\n\r\n" + chunk)
    try:
        async with asyncio.timeout(bench.target.timeout_s * 2):
            status = await reader.readline()
    except TimeoutError:
        raise Failed("there is no answer") from None
    finally:
        writer.close()
    expect(b" 200 " in status, f"the answer is {status!r}")


@check("envoy-forged-destination", Level.MUST, PROTOCOL)
async def forged(bench: Bench) -> None:
    """A destination that the client sends, once or twice, reaches neither the route nor the model server."""
    rig = await _rig(bench)
    for listener in ("duplex", "original-dst"):
        reply = await rig.ask(listener, more=[(protocol.DESTINATION, "127.0.0.1:9"), (protocol.DESTINATION, "127.0.0.2:9")])
        if listener == "original-dst" and reply.status == 503 and len(bench.target.endpoints) > 1:
            continue  # a list, which ORIGINAL_DST cannot take; that check says so
        expect(_followed(reply) in bench.target.endpoints, f"{reply.endpoint} answered")


@check("envoy-duplicate-headers", Level.SHOULD, PRACTICE)
async def duplicates(bench: Bench) -> None:
    """Headers that come twice reach the model server twice, as they were."""
    reply = await (await _rig(bench)).ask("duplex", more=[("x-custom", "one"), ("x-custom", "two, three")])
    expect(reply.values("x-custom") == ["one", "two, three"], f"the backend sees {reply.values('x-custom')}")


@check("envoy-events", Level.MUST, PRACTICE)
async def events(bench: Bench) -> None:
    """Each event of a stream reaches the client before the next one is sent."""
    await events_pass(bench, "duplex")


@check("envoy-events-duplex", Level.SHOULD, MODES)
async def events_duplex(bench: Bench) -> None:
    """Events pass at once if the response's body passes through the picker (FULL_DUPLEX_STREAMED both ways)."""
    await events_pass(bench, "duplex-both")


async def events_pass(bench: Bench, listener: str) -> None:
    """Streams events through one of the listeners; `Failed` where one is held back for the next."""
    rig = await _rig(bench)
    steps, seen = rig.stepwise(), 0
    limit = aiohttp.ClientTimeout(total=bench.target.timeout_s * 4)
    url = f"http://127.0.0.1:{rig.ports[listener]}{bench.target.path}"
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(url, data=bench.target.body(stream=True), headers=[("x-conformance-events", "stepwise")]) as response,
        ):
            async for line in response.content:
                if line.startswith(b"data:"):
                    seen += 1
                    steps.saw()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Failed(f"the stream breaks after {seen} events: {error!r}") from None
    expect(seen == EVENTS, f"{seen} of {EVENTS} events came")
    expect(steps.stalled_at is None, f"event {steps.stalled_at} did not come before the next one was sent")


@check("envoy-response-duplex", Level.MUST, MODES)
async def response_duplex(bench: Bench) -> None:
    """An answer whose body passes through the picker arrives whole."""
    body = bench.target.body(prompt="hello " * 20_000)
    await _serves(bench, "duplex-both", body)


async def _other_mode(bench: Bench, listener: str, prompt: str) -> None:
    rig, body = await _rig(bench), bench.target.body(prompt=prompt)
    reply = await rig.ask(listener, body)
    if reply.status >= 500:
        raise NotApplicable(f"the picker does not serve the mode: {reply.status}")
    _followed(reply)
    expect(reply.has_body(body), "the backend got another body")


@check("envoy-buffered", Level.SHOULD, MODES)
async def buffered(bench: Bench) -> None:
    """BUFFERED: the picked endpoint answers, and gets the body that was sent."""
    await _other_mode(bench, "buffered", "hello")


@check("envoy-streamed-ahead", Level.SHOULD, MODES)
async def streamed_ahead(bench: Bench) -> None:
    """STREAMED without waiting for the answer to the headers: so it is for a body of 5 MB."""
    await _other_mode(bench, "streamed", "x" * 5_000_000)


@check("envoy-original-dst", Level.SHOULD, PRACTICE)
async def original_dst(bench: Bench) -> None:
    """Gateways that map the header to ORIGINAL_DST, which takes one address, reach the picked endpoint."""
    rig = await _rig(bench)
    destinations = (await bench.ask()).picked().destinations
    if len(destinations) > 1:
        raise NotApplicable(
            f"the picker names {len(destinations)} destinations, as the protocol allows, and ORIGINAL_DST takes one"
        )
    _followed(await rig.ask("original-dst"))


@check("envoy-subset", Level.MUST, PROTOCOL)
async def subset(bench: Bench) -> None:
    """A gateway's subset decides who answers."""
    last = bench.endpoints(2)[-1]
    rig = await _rig(bench)
    for _ in range(5):
        reply = await rig.ask("subset-one")
        expect(reply.endpoint == last, f"{last} alone is allowed, and {reply.endpoint} answered")


@check("envoy-subset-empty", Level.MUST, PROTOCOL)
async def subset_empty(bench: Bench) -> None:
    """If a gateway's subset is empty, the client gets 503."""
    reply = await (await _rig(bench)).ask("subset-none")
    expect(reply.status == 503, f"the status is {reply.status}")


@check("envoy-errors", Level.SHOULD, PRACTICE)
async def errors(bench: Bench) -> None:
    """The client gets refusals as OpenAI errors: 503 if no endpoint may answer, 400 for a body that is not JSON."""
    rig = await _rig(bench)
    for reply, status in ((await rig.ask("subset-none"), 503), (await rig.ask("duplex", b"{"), 400)):
        expect(reply.status == status, f"the status is {reply.status}, not {status}")
        error_object(reply.body)
        kind = reply.headers.get("content-type", "")
        expect(kind.startswith("application/json"), f"the content-type is {kind}")


@check("envoy-concurrent", Level.MUST, EXT_PROC)
async def concurrent(bench: Bench) -> None:
    """A hundred requests at once are all served, each with its own body."""
    rig = await _rig(bench)

    async def one(number: int) -> bool:
        body = bench.target.body(user=f"user-{number}")
        reply = await rig.ask("duplex", body)
        _followed(reply)
        return reply.has_body(body)

    own = await asyncio.gather(*(one(number) for number in range(100)))
    expect(all(own), f"{own.count(False)} of 100 bodies got lost or mixed up")


@check("envoy-client-leaves", Level.MUST, EXT_PROC)
async def client_leaves(bench: Bench) -> None:
    """Clients that leave, before the body's end or in the middle of a stream, do no harm."""
    rig = await _rig(bench)
    for number in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", rig.ports["duplex"])
        body = bench.target.body(stream=True)
        length = len(body) + 10 * (number % 2)
        head = f"POST {bench.target.path} HTTP/1.1\r\nhost: x\r\nx-conformance-events: free\r\ncontent-length: {length}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()
    await _serves(bench, "duplex", bench.target.body())


@check("envoy-no-table", Level.MUST, HTTP2)
async def no_table(bench: Bench) -> None:
    """An Envoy that keeps no table for the picker's headers (`hpack_table_size: 0`) is agreed with, and so reads its answers."""
    for _ in range(2):
        await _serves(bench, "no-table", bench.target.body())


@check("envoy-fallback", Level.SHOULD, PROTOCOL)
async def fallback(bench: Bench) -> None:
    """If one endpoint is gone, requests go to the next one of the ordered list, and none is lost."""
    gone = bench.endpoints(2)[0]
    rig = await _rig(bench)
    if len((await bench.ask()).picked().destinations) < 2:
        raise NotApplicable("the picker names one destination, so that there is nothing to fall back on")
    await rig.backends[gone].stop()
    try:
        replies = [await rig.ask("duplex", orjson.dumps({**orjson.loads(bench.target.body()), "user": str(n)})) for n in range(8)]
    finally:
        await rig.backends[gone].start()
    failed = [reply.status for reply in replies if reply.status != 200]
    expect(not failed, f"{len(failed)} of {len(replies)} requests failed: {failed}")


GROUP = Group(
    "envoy",
    "Through Envoy",
    (
        *(picked, large_body, bodyless, trailers, forged, duplicates, events, events_duplex, response_duplex, buffered),
        streamed_ahead,
        *(original_dst, subset, subset_empty, errors, concurrent, client_leaves, no_table, fallback),
    ),
    alone=True,
)
