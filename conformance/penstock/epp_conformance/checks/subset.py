"""Subset hints: the gateway says which endpoints are allowed. A hint that allows nobody allows nobody."""

from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import PRACTICE, PROTOCOL, Group, Level, check
from penstock.epp_conformance.verdict import NotApplicable, expect

NOBODY = "192.0.2.1:9"
"""An address for documentation, RFC 5737: no replica has it."""
NOBODY_6 = "[2001:db8::1]:9"


TIMES = 6
"""How often a hint is tried: once is kept by luck."""


async def _only(bench: Bench, hint: object, allowed: set[str], hint_on: str = "both") -> None:
    for _ in range(TIMES):
        destinations = (await bench.ask(hint=hint, hint_on=hint_on)).picked().destinations
        expect(
            set(destinations) <= allowed, f"the hint {hint} allows {sorted(allowed)}, and the pick is {','.join(destinations)}"
        )


@check("subset-list", Level.MUST, PROTOCOL)
async def as_list(bench: Bench) -> None:
    """A hint that lists one endpoint, `ip:port`, decides, whichever endpoint it is."""
    for endpoint in bench.endpoints(2):
        await _only(bench, [endpoint], {endpoint})


@check("subset-of-several", Level.MUST, PROTOCOL)
async def of_several(bench: Bench) -> None:
    """Of several endpoints, known and unknown, a known one is picked."""
    last = bench.endpoints(2)[-1]
    await _only(bench, [NOBODY, last, "192.0.2.2:9"], {last})


@check("subset-fallbacks", Level.MUST, PROTOCOL)
async def fallbacks(bench: Bench) -> None:
    """The whole list of destinations stays inside of the hint, not its head alone."""
    allowed = bench.endpoints(3)[:2]
    await _only(bench, list(allowed), set(allowed))


@check("subset-absent", Level.MUST, PROTOCOL)
async def absent(bench: Bench) -> None:
    """Without a hint the whole pool is allowed."""
    (await bench.ask()).picked()


@check("subset-empty-list", Level.MUST, PROTOCOL)
async def empty_list(bench: Bench) -> None:
    """An empty list allows nobody: ImmediateResponse 503."""
    (await bench.ask(hint=[])).refused(503)


@check("subset-unmatched", Level.MUST, PROTOCOL)
async def unmatched(bench: Bench) -> None:
    """A hint that no endpoint matches allows nobody: ImmediateResponse 503."""
    (await bench.ask(hint=[NOBODY, NOBODY_6])).refused(503)


@check("subset-bodyless", Level.MUST, PROTOCOL)
async def bodyless(bench: Bench) -> None:
    """The hint counts for a request without a body too."""
    last = bench.endpoints(2)[-1]
    for _ in range(TIMES):
        outcome = await bench.look(hint=[last])
        if outcome.immediate is not None and outcome.immediate.status.code == 200:
            raise NotApplicable("the picker answers GET /v1/models itself")
        expect(set(outcome.picked().destinations) <= {last}, f"the pick is {outcome.picked().value}")


@check("subset-string", Level.SHOULD, PRACTICE)
async def as_string(bench: Bench) -> None:
    """A hint may be one string, with commas and spaces between endpoints."""
    last = bench.endpoints(2)[-1]
    await _only(bench, f"{NOBODY}, {last}", {last})


@check("subset-comma-in-item", Level.SHOULD, PRACTICE)
async def comma_in_item(bench: Bench) -> None:
    """An item of the list may hold several endpoints, with commas between them."""
    last = bench.endpoints(2)[-1]
    await _only(bench, [f"{NOBODY},{last}"], {last})


@check("subset-address-only", Level.SHOULD, PRACTICE)
async def address_only(bench: Bench) -> None:
    """An address without a port allows every port of it, and no other address."""
    host = bench.endpoints(1)[-1].rpartition(":")[0]
    await _only(bench, [host.strip("[]")], {e for e in bench.target.endpoints if e.rpartition(":")[0] == host})


@check("subset-brackets", Level.SHOULD, PRACTICE)
async def brackets(bench: Bench) -> None:
    """IPv6 addresses in brackets are read, beside others."""
    six = [endpoint for endpoint in bench.target.endpoints if endpoint.startswith("[")]
    allowed = (six or list(bench.endpoints(2)))[-1]
    await _only(bench, [NOBODY_6, allowed], {allowed})


@check("subset-on-headers", Level.SHOULD, PRACTICE)
async def on_headers(bench: Bench) -> None:
    """A hint counts where the message of the headers alone carries it: gateways differ."""
    last = bench.endpoints(2)[-1]
    await _only(bench, [last], {last}, "headers")


@check("subset-on-body", Level.SHOULD, PRACTICE)
async def on_body(bench: Bench) -> None:
    """A hint counts where the last message of the body alone carries it."""
    last = bench.endpoints(2)[-1]
    await _only(bench, [last], {last}, "body")


@check("subset-empty-string", Level.MUST, PROTOCOL)
async def empty_string(bench: Bench) -> None:
    """An empty string allows nobody: ImmediateResponse 503."""
    (await bench.ask(hint="")).refused(503)


@check("subset-unreadable", Level.SHOULD, PRACTICE)
async def unreadable(bench: Bench) -> None:
    """A hint of a type that cannot be read (null, a number, a struct, a list of numbers) allows nobody: it never fails open."""
    for hint in (None, 7, {"endpoints": NOBODY}, [7, None]):
        outcome = await bench.ask(hint=hint)
        expect(outcome.immediate is not None, f"the hint {hint!r} is taken for none")
        outcome.refused(503)


GROUP = Group(
    "subset",
    "Subset hints",
    (
        *(as_list, of_several, fallbacks, absent, empty_list, empty_string, unmatched, bodyless),
        *(as_string, comma_in_item, address_only, brackets, on_headers, on_body, unreadable),
    ),
)
