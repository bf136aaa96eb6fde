"""Penstock's extensions of the protocol, as checks beside the suite's: `make conformance` runs both."""

import orjson

from penstock.api import headers
from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import Group, Level, check
from penstock.epp_conformance.checks.envoy import events_pass
from penstock.epp_conformance.conversation import BUFFERED, NONE
from penstock.epp_conformance.outcome import Outcome, error_object, sets_of
from penstock.epp_conformance.verdict import expect

PENSTOCK = "docs/gateway/picker.md"

_TIMES = 10
"""Races are lost now and then."""


@check("penstock-pool", Level.MUST, PENSTOCK)
async def pool(bench: Bench) -> None:
    """The pick sets `x-penstock-pool`, by which Penstock's own Envoy finds the cluster, over what a client sends."""
    pick = (await bench.ask(more=[(headers.POOL, "forged")])).picked()
    value = sets_of(pick.response).get(headers.POOL)
    expect(value and value.count("/") == 2, f"{headers.POOL} is {value}")


@check("penstock-load-report", Level.MUST, PENSTOCK)
async def load_report(bench: Bench) -> None:
    """The pick asks for a load report, and the response loses it again."""
    async with bench.stream() as stream:
        await stream.headers()
        await stream.body(bench.target.body())
        value = sets_of((await stream.outcome()).picked().response).get(headers.LOAD_FORMAT)
        expect(value == "TEXT", f"{headers.LOAD_FORMAT} is {value}")
        await stream.response_headers((headers.LOAD, "TEXT named_metrics.kv_cache_utilization=0.5"))
        answer = await stream.read("answer to the response headers")
    removed = list(answer.response_headers.response.header_mutation.remove_headers)
    expect(headers.LOAD in removed, f"removed: {removed}")


@check("penstock-decision", Level.MUST, PENSTOCK)
async def decision(bench: Bench) -> None:
    """`x-penstock-decision: explain` is answered by a response header that says why."""
    async with bench.stream() as stream:
        await stream.headers(more=[(headers.DECISION, "explain")])
        await stream.body(bench.target.body())
        (await stream.outcome()).picked()
        await stream.response_headers(("content-type", "application/json"))
        sets = sets_of((await stream.read("answer to the response headers")).response_headers.response)
    expect(sets.get(headers.DECISION), f"{headers.DECISION} is {sets.get(headers.DECISION)}")
    expect(sets.get(headers.REPLICA), f"{headers.REPLICA} is {sets.get(headers.REPLICA)}")


@check("penstock-control-headers", Level.MUST, PENSTOCK)
async def control_headers(bench: Bench) -> None:
    """Every control header of a client's is removed or overwritten."""
    forged = [(name, "forged") for name in headers.CONTROL_HEADERS]
    mutation = (await bench.ask(more=forged)).picked().response.header_mutation
    touched = {*mutation.remove_headers, *(option.header.key for option in mutation.set_headers)}
    left = set(headers.CONTROL_HEADERS) - touched
    expect(not left, f"left: {sorted(left)}")


@check("penstock-models", Level.MUST, PENSTOCK)
async def models(bench: Bench) -> None:
    """`GET /v1/models` is answered from the fleet."""
    answer = (await bench.look()).refused(200)
    names = [entry["id"] for entry in orjson.loads(answer.body)["data"]]
    expect(bench.target.model in names, f"{bench.target.model} is not among {names}")


@check("penstock-early-refusal", Level.MUST, PENSTOCK)
async def early_refusal(bench: Bench) -> None:
    """What no body could save (an unknown path, a wrong method) is refused at the headers."""
    for path, method, status in (("/nowhere", "POST", 404), (bench.target.path, "DELETE", 405)):
        async with bench.stream() as stream:
            await stream.headers(path=path, method=method)
            refusal = Outcome([await stream.read("refusal")]).refused(status)
        expect(sets_of(refusal).get(headers.REASON), f"{status} has no {headers.REASON}")
        error_object(refusal.body)


@check("penstock-refusal-while-sending", Level.MUST, PENSTOCK)
async def refusal_while_sending(bench: Bench) -> None:
    """A client that continues to send a body refused at its headers is not cut off, and reads the refusal."""
    for _ in range(_TIMES):
        async with bench.stream() as stream:
            await stream.headers(path="/nowhere")
            await stream.body(bench.target.body(), piece=5)
            Outcome([await stream.read("refusal")]).refused(404)


@check("penstock-too-large", Level.MUST, PENSTOCK)
async def too_large(bench: Bench) -> None:
    """A body above 20 MiB is 413 before its end."""
    async with bench.stream() as stream:
        await stream.headers()
        await stream.body(bytes(20 * 1024 * 1024 + 1), ends=False)
        Outcome([await stream.read("refusal")]).refused(413)


@check("penstock-unserved-modes", Level.MUST, PENSTOCK)
async def unserved_modes(bench: Bench) -> None:
    """A mode that no picker can serve is FAILED_PRECONDITION, and the message names it."""
    async with bench.stream() as stream:
        await stream.headers(mode=NONE)
        ended = await stream.end()
    expect(ended.startswith("FAILED_PRECONDITION") and "request_body_mode NONE" in ended, f"the stream is {ended}")


@check("penstock-unbuffers-responses", Level.MUST, PENSTOCK)
async def unbuffers(bench: Bench) -> None:
    """A gateway that buffers responses is asked not to, so that streams stay streams."""
    async with bench.stream() as stream:
        await stream.headers(response_mode=BUFFERED)
        await stream.body(bench.target.body())
        (await stream.outcome()).picked()
        await stream.response_headers(("content-type", "text/event-stream"))
        answer = await stream.read("answer to the response headers")
    expect(answer.HasField("mode_override"), "there is no mode_override")


@check("penstock-buffered-responses", Level.MUST, PENSTOCK)
async def buffered_responses(bench: Bench) -> None:
    """If Envoy buffers responses but allows a change of that mode, each event reaches the client before the next one is sent."""
    await events_pass(bench, "buffered-response")


GROUP = Group(
    "penstock",
    "Penstock's own extensions",
    (
        *(pool, load_report, decision, control_headers, models, early_refusal),
        *(refusal_while_sending, too_large, unserved_modes, unbuffers),
    ),
)

THROUGH_ENVOY = Group("penstock-envoy", "Penstock's own extensions, through Envoy", (buffered_responses,), alone=True)

OWN: tuple[Group, ...] = (GROUP, THROUGH_ENVOY)
