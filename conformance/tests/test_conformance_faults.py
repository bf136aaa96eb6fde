"""The suite is right about pickers: one that keeps the protocol fails nothing, and each fault fails exactly its checks."""

from collections.abc import Sequence

import pytest
from small_picker import MODEL, serving

from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import Level
from penstock.epp_conformance.rig import Rig
from penstock.epp_conformance.runner import Outcome, Result, run, selected
from penstock.epp_conformance.suite import GROUPS
from penstock.epp_conformance.target import Target
from testing.ports import free_ports

pytestmark = pytest.mark.slow

ENDPOINTS = ["127.0.0.1:7001", "127.0.0.1:7002", "127.0.0.2:7001"]
SLOW = ["envoy", "stream-many", "stream-concurrent", "duplex-body-*"]

BODY = {
    f"duplex-{name}" for name in ("whole-body", "same-bytes", "small-pieces", "empty-last-message", "end-of-stream", "trailers")
}
HINTS = {
    "list",
    "of-several",
    "fallbacks",
    "bodyless",
    "string",
    "comma-in-item",
    "address-only",
    "brackets",
    "on-headers",
    "on-body",
}
NOBODY = {"subset-empty-list", "subset-empty-string", "subset-unreadable"}
BAD_BODY = {f"refusal-{name}" for name in ("bad-json", "no-object", "no-model", "unknown-model")}
RESPONSE = {
    "headers",
    "without-body",
    "error-status",
    "served",
    "duplex",
    "events-pass",
    "chunk-size",
    "trailers",
    "streamed",
    "buffered",
}
HEALTH = {"any", "liveness", "readiness", "ext-proc", "empty-name", "inference-extension", "unknown-name", "watch"}

FAULTS: dict[str, set[str]] = {
    # the body
    "no_streamed_response": {"duplex-streamed-response", "no-protocol-config", *BODY},
    "body_first": {"duplex-headers-first"},
    "loses_a_chunk": BODY,
    "other_bytes": {"duplex-same-bytes"},
    "large_chunks": {"duplex-chunk-size"},
    "ends_early": {"duplex-end-of-stream"},
    "never_ends": {"duplex-end-of-stream", "no-protocol-config"},
    "answers_duplicates": {"duplex-duplicate-end"},
    "ignores_trailers": {"duplex-trailers", "duplex-trailers-no-end-of-stream", "duplex-trailers-alone"},
    "ends_before_trailers": {"duplex-trailers-no-end-of-stream"},
    "needs_protocol_config": {"no-protocol-config"},
    # the pick
    "no_header": {"pick-header", "forged-destination"},
    "no_metadata": {"pick-metadata"},
    "other_metadata": {"pick-metadata"},
    "names_pods": {"pick-format", "pick-known", "bodyless-answered", "forged-destination", *(f"subset-{name}" for name in HINTS)},
    "keeps_the_route": {"pick-route-cache"},
    "appends": {"pick-overwrites"},
    "says_values_twice": {"pick-raw-value"},
    "touches_the_host": {"pick-allowed-headers"},
    "copies_headers": {"pick-leaves-headers"},
    "believes_clients": {"forged-destination"},
    "passes_forged_headers": {"forged-removed"},
    "removes_what_it_sets": {"set-or-removed"},
    # subsets
    "empty_hints_fail_open": NOBODY,
    "takes_string_hints_for_none": {"subset-string", "subset-empty-string"},
    "ignores_ports": {"subset-list"},
    "falls_back_outside": {f"subset-{name}" for name in HINTS},
    "reads_hints_on_headers_alone": {"subset-on-body"},
    "reads_hints_on_bodies_alone": {"subset-on-headers", "subset-bodyless"},
    # refusals
    "reads_no_body": {"refusal-bad-json", "refusal-no-object", "refusal-no-model"},
    "refuses_by_grpc": {
        "duplex-empty-body",
        "duplex-trailers-alone",
        "subset-unmatched",
        *NOBODY,
        "refusal-immediate",
        *BAD_BODY,
    },
    "refuses_with_500": {"subset-unmatched", *NOBODY, "refusal-immediate", *BAD_BODY},
    "refuses_in_plain_text": {"refusal-json"},
    "refuses_without_retry_after": {"refusal-retry-after"},
    "refuses_twice": {"refusal-last"},
    "hangs_on_refusals": {
        "duplex-empty-body",
        "duplex-trailers-alone",
        "subset-unmatched",
        *NOBODY,
        "refusal-immediate",
        *BAD_BODY,
    },
    # the response, and the rest
    "crashes_on_responses": {f"response-{name}" for name in RESPONSE},
    "holds_events": {"response-events-pass"},
    "plain_response_bodies": {"response-duplex", "response-chunk-size"},
    "answers_observers": {"stream-observability"},
    "has_no_health": {f"health-{name}" for name in HEALTH},
}

THROUGH_ENVOY: dict[str, set[str]] = {
    "": set(),
    "believes_clients": {"envoy-forged-destination"},
    "copies_headers": {"envoy-duplicate-headers"},
    "empty_hints_fail_open": {"envoy-subset-empty", "envoy-errors"},
    "holds_events": {"envoy-events-duplex"},
    "ignores_trailers": {"envoy-trailers"},
}

SUFFERED = ["envoy-picked", *sorted(set().union(*THROUGH_ENVOY.values()))]


async def judge(
    fault: str, only: Sequence[str] = (), skip: Sequence[str] = SLOW, at_once: int = 32, timeout_s: float = 3.0
) -> list[Result]:
    async with serving(ENDPOINTS, fault) as port:
        target = Target(
            host="127.0.0.1", port=port, model=MODEL, endpoints=tuple(ENDPOINTS), health=("127.0.0.1", port),
            timeout_s=timeout_s,
        )  # fmt: skip
        channel = await target.channel()
        try:
            return [result async for result in run(selected(GROUPS, only, skip), Bench(target, channel, None), at_once)]
        finally:
            await channel.close()


def failed(results: list[Result]) -> set[str]:
    return {result.check.name for result in results if result.outcome is Outcome.FAIL}


@pytest.mark.req("RT-41")
async def test_a_picker_that_keeps_the_protocol_fails_nothing() -> None:
    results = await judge("", skip=["stream-many", "duplex-body-20mb"])
    assert not failed(results), [result.detail for result in results if result.outcome is Outcome.FAIL]
    impossible = {result.check.name for result in results if result.outcome is Outcome.NOT_APPLICABLE}
    envoy = {check.name for group in GROUPS if group.name == "envoy" for check in group.checks}
    modes = {check.name for group in GROUPS for check in group.checks if check.name.startswith("buffered-")}
    assert impossible == envoy | modes | {"mode-streamed-ahead"}


@pytest.mark.req("RT-41")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_fails_exactly_its_checks(fault: str) -> None:
    assert failed(await judge(fault)) == FAULTS[fault]


@pytest.mark.req("RT-41")
@pytest.mark.parametrize("fault", THROUGH_ENVOY)
async def test_a_client_of_envoy_suffers_from_a_fault(fault: str) -> None:
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
    async with serving(endpoints, fault) as port:
        target = Target(
            host="127.0.0.1", port=port, model=MODEL, endpoints=tuple(endpoints), health=("127.0.0.1", port),
            timeout_s=2.0, serve=True,
        )  # fmt: skip
        async with await target.channel() as channel, Rig(target) as rig:
            results = [result async for result in run(selected(GROUPS, SUFFERED, []), Bench(target, channel, rig))]
    assert failed(results) == THROUGH_ENVOY[fault]


async def test_a_picker_that_serves_one_after_the_other_is_found_out() -> None:
    results = await judge("one_at_a_time", ["streams"], ["stream-many"], at_once=1, timeout_s=1.0)
    assert failed(results) == {"stream-interleaved"}


def test_every_fault_that_a_gateway_would_suffer_from_is_a_must() -> None:
    musts = {check.name for group in GROUPS for check in group.checks if check.level is Level.MUST}
    harmless = {
        "other_bytes",
        "keeps_the_route",
        "appends",
        "copies_headers",
        "passes_forged_headers",
        "reads_hints_on_headers_alone",
    }
    harmless |= {
        "refuses_in_plain_text",
        "refuses_without_retry_after",
        "holds_events",
        "touches_the_host",
        "answers_observers",
        "reads_no_body",
    }
    assert {fault for fault, checks in FAULTS.items() if not checks & musts} == harmless
