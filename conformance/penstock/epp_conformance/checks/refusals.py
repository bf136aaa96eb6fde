"""Refusals: what the client sees when a request goes nowhere."""

from penstock.epp_conformance._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ImmediateResponse
from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import EXT_PROC, OPENAI, PRACTICE, PROTOCOL, Group, Level, check
from penstock.epp_conformance.checks.subset import NOBODY
from penstock.epp_conformance.conversation import Hint
from penstock.epp_conformance.outcome import Outcome, error_object, sets_of
from penstock.epp_conformance.verdict import Failed, NotApplicable, expect


async def _refusal(bench: Bench, body: bytes | None = None, hint: Hint = ...) -> tuple[Outcome, ImmediateResponse]:
    """A refusal to look at; NotApplicable where there is none, which other checks are about."""
    try:
        outcome = await bench.ask(body, hint=hint)
    except Failed as failed:
        raise NotApplicable(f"there is no ImmediateResponse to look at: {failed}") from None
    if outcome.immediate is None:
        raise NotApplicable("there is no ImmediateResponse to look at: the request is sent on")
    return outcome, outcome.immediate


async def _nobody(bench: Bench) -> ImmediateResponse:
    """Return the refusal of a request with no permitted endpoint."""
    return (await _refusal(bench, hint=[NOBODY]))[1]


@check("refusal-immediate", Level.MUST, PROTOCOL)
async def immediate(bench: Bench) -> None:
    """The picker refuses a request with no permitted endpoint by an ImmediateResponse. A gRPC error would reach clients as status
    500."""
    (await bench.ask(hint=[NOBODY])).refused(503, 429)


@check("refusal-last", Level.MUST, EXT_PROC)
async def last(bench: Bench) -> None:
    """After an ImmediateResponse, the picker sends nothing more."""
    await _refusal(bench, hint=[NOBODY])
    async with bench.stream() as stream:
        await stream.headers(hint=[NOBODY])
        await stream.body(bench.target.body(), hint=[NOBODY])
        await stream.outcome()
        await stream.quiet("the ImmediateResponse")


@check("refusal-alone", Level.MUST, EXT_PROC)
async def alone(bench: Bench) -> None:
    """A refused request has not been sent on before: nothing of its body came back."""
    outcome, _ = await _refusal(bench, hint=[NOBODY])
    expect("request_body" not in outcome.kinds(), f"the answers are {outcome.kinds()}")


@check("refusal-bad-json", Level.SHOULD, PRACTICE)
async def bad_json(bench: Bench) -> None:
    """A body that is no JSON is refused with 400."""
    (await bench.ask(b'{"model": ')).refused(400)


@check("refusal-no-object", Level.SHOULD, PRACTICE)
async def no_object(bench: Bench) -> None:
    """A body that is JSON and no object is refused with 400."""
    (await bench.ask(b"[1, 2]")).refused(400)


@check("refusal-no-model", Level.SHOULD, PRACTICE)
async def no_model(bench: Bench) -> None:
    """A body that names no model, or one that is no string, is refused with 400."""
    (await bench.ask(b'{"prompt": "hello"}')).refused(400)
    (await bench.ask(b'{"model": 7, "prompt": "hello"}')).refused(400)


@check("refusal-unknown-model", Level.SHOULD, OPENAI)
async def unknown_model(bench: Bench) -> None:
    """A model that nobody serves is refused with 404 (or 400), where the picker knows its models."""
    outcome = await bench.ask(bench.target.body(model="no-such-model-7f3a"))
    if outcome.immediate is None:
        raise NotApplicable("the picker leaves it to the model servers to know their models")
    outcome.refused(404, 400)


@check("refusal-json", Level.SHOULD, OPENAI)
async def as_json(bench: Bench) -> None:
    """A refusal is `application/json` in the shape of OpenAI's errors, which is all that clients can read."""
    for refusal in (await _nobody(bench), (await _refusal(bench, b'{"model": '))[1]):
        kind = sets_of(refusal).get("content-type", "none")
        expect(kind.startswith("application/json"), f"{refusal.status.code} has content-type {kind}")
        error_object(refusal.body)


@check("refusal-retry-after", Level.SHOULD, PRACTICE)
async def retry_after(bench: Bench) -> None:
    """503 says after how many seconds trying again makes sense."""
    refusal = await _nobody(bench)
    if refusal.status.code not in (429, 503):
        raise NotApplicable(f"the refusal is {refusal.status.code}")
    value = sets_of(refusal).get("retry-after")
    expect(value is not None and value.isdigit(), f"retry-after is {value}")


@check("refusal-reason", Level.SHOULD, PRACTICE)
async def reason(bench: Bench) -> None:
    """A refusal has a header that tells a machine why: its name ends in `-reason`, or begins with `x-error-`."""
    names = list(sets_of(await _nobody(bench)))
    expect(any(name.endswith("-reason") or name.startswith("x-error-") for name in names), f"the headers are {names}")


@check("refusal-details", Level.SHOULD, EXT_PROC)
async def details(bench: Bench) -> None:
    """A refusal has `details`, which Envoy's access log shows as the response code's details."""
    found = (await _nobody(bench)).details
    expect(found and not any(each.isspace() for each in found), f"details: {found!r}")


GROUP = Group(
    "refusals",
    "Refusals",
    (immediate, last, alone, bad_json, no_object, no_model, unknown_model, as_json, retry_after, reason, details),
)
