"""The pick: what the answer says, and what it leaves alone."""

from penstock.epp_conformance import protocol
from penstock.epp_conformance._pb.envoy.config.core.v3.base_pb2 import HeaderValueOption
from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import EXT_PROC, MUTATIONS, PRACTICE, PROTOCOL, Group, Level, check
from penstock.epp_conformance.outcome import Outcome, is_endpoint
from penstock.epp_conformance.verdict import expect

OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_MANY = 100
"""Headers that Envoy lets one mutation have."""


@check("pick-header", Level.MUST, PROTOCOL)
async def header(bench: Bench) -> None:
    """The destination is set as request header `x-gateway-destination-endpoint`."""
    expect((await bench.ask()).picked().header, f"{protocol.DESTINATION} is not set")


@check("pick-metadata", Level.MUST, PROTOCOL)
async def metadata(bench: Bench) -> None:
    """The destination is set as dynamic metadata under `envoy.lb`, with the same value as the header."""
    pick = (await bench.ask()).picked()
    expect(pick.metadata is not None, f"envoy.lb has no {protocol.DESTINATION}")
    expect(pick.header in (None, pick.metadata), f"metadata says {pick.metadata}, the header {pick.header}")


@check("pick-format", Level.MUST, PROTOCOL)
async def form(bench: Bench) -> None:
    """The destination is `ip:port`, or an ordered list of them separated by commas; IPv6 stands in brackets; none comes twice."""
    destinations = (await bench.ask()).picked().destinations
    wrong = [item for item in destinations if not is_endpoint(item)]
    expect(not wrong, f"no ip:port: {wrong}")
    expect(len(set(destinations)) == len(destinations), f"an endpoint comes twice: {destinations}")


@check("pick-known", Level.MUST, PROTOCOL)
async def known(bench: Bench) -> None:
    """Every destination is a replica that the picker knows."""
    endpoints = set(bench.endpoints(1))
    for _ in range(5):
        strange = set((await bench.ask()).picked().destinations) - endpoints
        expect(not strange, f"not among the endpoints: {sorted(strange)}")


@check("pick-route-cache", Level.SHOULD, EXT_PROC)
async def route_cache(bench: Bench) -> None:
    """The answer with the destination clears the route cache, so that routes may match what it sets."""
    expect((await bench.ask()).picked().response.clear_route_cache, "clear_route_cache is not set")


@check("pick-overwrites", Level.SHOULD, MUTATIONS)
async def overwrites(bench: Bench) -> None:
    """Headers are set with OVERWRITE_IF_EXISTS_OR_ADD: the enum's zero means append, and not every proxy reads it otherwise."""
    options = (await bench.ask()).picked().response.header_mutation.set_headers
    others = [option.header.key for option in options if option.append_action != OVERWRITE]
    expect(not others, f"set with another action: {others}")


@check("pick-raw-value", Level.MUST, MUTATIONS)
async def raw_value(bench: Bench) -> None:
    """No header has both `value` and `raw_value`: Envoy rejects such an answer."""
    options = (await bench.ask()).picked().response.header_mutation.set_headers
    both = [option.header.key for option in options if option.header.value and option.header.raw_value]
    expect(not both, f"both are set: {both}")


@check("pick-allowed-headers", Level.SHOULD, MUTATIONS)
async def allowed_headers(bench: Bench) -> None:
    """Neither the host, nor pseudo-headers, nor `x-envoy-*` are touched: Envoy ignores that, or rejects the answer."""
    mutation = (await bench.ask()).picked().response.header_mutation
    names = [*(option.header.key.lower() for option in mutation.set_headers), *(name.lower() for name in mutation.remove_headers)]
    wrong = [name for name in names if name == "host" or name.startswith("x-envoy-") or (name[0] == ":" and name != ":path")]
    expect(not wrong, f"touched: {wrong}")


@check("pick-leaves-headers", Level.SHOULD, MUTATIONS)
async def leaves_headers(bench: Bench) -> None:
    """Headers that do not concern the picker are neither set again (which collapses duplicates) nor removed."""
    mine = [
        ("accept", "a/b"),
        ("accept", "c/d"),
        ("user-agent", "conformance"),
        ("cookie", "a=b"),
        ("x-custom", "1"),
        ("x-custom", "2"),
    ]
    mutation = (await bench.ask(more=mine)).picked().response.header_mutation
    touched = {option.header.key.lower() for option in mutation.set_headers} | {name.lower() for name in mutation.remove_headers}
    again = sorted(touched & {name for name, _ in mine})
    expect(not again, f"touched: {again}")


@check("pick-many-headers", Level.MUST, MUTATIONS)
async def many_headers(bench: Bench) -> None:
    """A request with a hundred headers is served, and the answer has no more mutations than Envoy allows."""
    more = [(f"x-header-{number}", "v" * 50) for number in range(_MANY - 10)]
    mutation = (await bench.ask(more=more)).picked().response.header_mutation
    count = max(len(mutation.set_headers), len(mutation.remove_headers))
    expect(count <= _MANY, f"{count} headers are touched")


@check("pick-any-bytes", Level.MUST, EXT_PROC)
async def any_bytes(bench: Bench) -> None:
    """Header values are bytes; those that are no UTF-8 do not keep a request from being served."""
    (await bench.ask(more=[("x-custom", b"caf\xe9\xff")])).picked()


@check("bodyless-answered", Level.MUST, EXT_PROC)
async def bodyless(bench: Bench) -> None:
    """A request without a body is decided at its headers: a destination, or an answer of the picker's own."""
    outcome = await bench.look()
    if outcome.immediate is None:
        strange = set(outcome.picked().destinations) - set(bench.endpoints(1))
        expect(not strange, f"not among the endpoints: {sorted(strange)}")


@check("bodyless-one-answer", Level.MUST, EXT_PROC)
async def bodyless_one_answer(bench: Bench) -> None:
    """A request without a body has one answer: there is no body to send again."""
    async with bench.stream() as stream:
        await stream.headers(method="GET", path="/v1/models", ends=True)
        outcome = await stream.outcome()
        expect(outcome.kinds() in (["request_headers"], ["immediate_response"]), f"the answers are {outcome.kinds()}")
        await stream.quiet("the answer to the headers")


def _forged(name: str) -> list[tuple[str, str]]:
    return [(name, "192.0.2.1:9"), (name, "192.0.2.2:9")]


@check("forged-destination", Level.MUST, PROTOCOL)
async def forged_destination(bench: Bench) -> None:
    """A destination that the client sends is replaced, not appended to, however often it sends one."""
    known = set(bench.endpoints(1))
    pick = (await bench.ask(more=_forged(protocol.DESTINATION))).picked()
    expect(set(pick.destinations) <= known, f"sent on to {pick.value}")
    options = [o for o in pick.response.header_mutation.set_headers if o.header.key.lower() == protocol.DESTINATION]
    appended = len(options) != 1 or options[0].append.value or options[0].append_action == HeaderValueOption.ADD_IF_ABSENT
    expect(not appended, "the header is added to, and a forged value stays")


@check("forged-subset", Level.MUST, PROTOCOL)
async def forged_subset(bench: Bench) -> None:
    """The subset is metadata of the gateway's: a header of that name says nothing."""
    (await bench.ask(more=_forged(protocol.SUBSET))).picked()


@check("forged-removed", Level.SHOULD, PRACTICE)
async def forged_removed(bench: Bench) -> None:
    """Control headers of a client's (subset, served endpoint) are removed, and reach no model server."""
    forged = [*_forged(protocol.SUBSET), *_forged(protocol.DESTINATION_SERVED)]
    mutation = (await bench.ask(more=forged)).picked().response.header_mutation
    touched = {name.lower() for name in mutation.remove_headers} | {option.header.key.lower() for option in mutation.set_headers}
    left = {protocol.SUBSET, protocol.DESTINATION_SERVED} - touched
    expect(not left, f"goes on to the model server: {sorted(left)}")


@check("set-or-removed", Level.MUST, MUTATIONS)
async def set_or_removed(bench: Bench) -> None:
    """No header is both set and removed in one answer: proxies differ in which one applies."""
    outcome: Outcome = await bench.ask(more=_forged(protocol.DESTINATION))
    mutation = outcome.picked().response.header_mutation
    both = {o.header.key.lower() for o in mutation.set_headers} & {name.lower() for name in mutation.remove_headers}
    expect(not both, f"set and removed: {sorted(both)}")


GROUP = Group(
    "pick",
    "The pick and its headers",
    (
        *(header, metadata, form, known, route_cache, overwrites, raw_value, allowed_headers, leaves_headers, many_headers),
        *(any_bytes, bodyless, bodyless_one_answer, forged_destination, forged_subset, forged_removed, set_or_removed),
    ),
)
