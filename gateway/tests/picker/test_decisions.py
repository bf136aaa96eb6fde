"""The log of decisions: kept as figures, written out when somebody reads it."""

import gc

import msgspec
import pytest
from picks import Known, cost, replica, report, slate

from penstock.gateway.extproc.decisions import KEPT, REJECTED_SHOWN, DecisionLog
from penstock.gateway.picker.choice import MAX_ENDPOINTS, RANKED, Choice, choose
from penstock.gateway.picker.cost import HORIZON_TOKENS
from penstock.gateway.picker.request import Prompt, RequestView

REQUEST = RequestView(id="r", path="/v1/completions", model="m", prompts=(Prompt(40, (b"\x07" * 32,) * 2),))


def fleet(replicas: int) -> list[Known]:
    return [Known(at, report=report(prefill_backlog_tokens=1000 * at)) for at in range(replicas)]


def pick(replicas: int, ident: str = "r") -> tuple[RequestView, Choice]:
    request = msgspec.structs.replace(REQUEST, id=ident)
    gone = [Known(100 + at, ready=False) for at in range(20)]
    return request, choose(slate([*fleet(replicas), *gone], request), "Cost")


def test_a_decision_is_shown_with_every_term_of_its_best_candidates() -> None:
    request, choice = pick(RANKED + 5)
    log = DecisionLog()
    log.add(request, choice, 0.25, 1e9)
    (decision,) = log.last(1)
    assert (decision.request_id, decision.picked, decision.waited_s, decision.time) == ("r", "m-p-0", 0.25, 1e9)
    assert decision.endpoints == [replica(at).endpoint for at in range(MAX_ENDPOINTS)]
    assert [scored.name for scored in decision.candidates] == [f"m-p-{at}" for at in range(RANKED)]
    assert [(r.name, r.why) for r in decision.rejected] == [(f"m-p-{100 + at}", "not ready") for at in range(REJECTED_SHOWN)]
    assert decision.reasons == choice.reasons
    everybody = fleet(RANKED + 5)
    for known, scored in zip(everybody, decision.candidates, strict=False):
        expected = cost(everybody, known, request)
        assert scored.score == pytest.approx(sum(expected.values()))
        itl = expected.pop("itl")
        ttft = sum(expected.values()) - expected["eviction_s"] - expected["crowding_s"]
        assert scored.terms == pytest.approx({**expected, "itl_s": itl / HORIZON_TOKENS, "correction_s": 0.0, "ttft_s": ttft})


def test_the_last_decisions_are_kept_newest_first_and_no_prompts_with_them() -> None:
    log = DecisionLog()
    for at in range(KEPT + 3):
        request, choice = pick(1, str(at))
        log.add(request, choice, 0.0, 0.0)
    assert [decision.request_id for decision in log.last(2)] == [str(KEPT + 2), str(KEPT + 1)]
    assert len(log.last(10 * KEPT)) == KEPT
    assert any(found is REQUEST.prompts for found in _reachable(request))
    assert not any(found is REQUEST.prompts for found in _reachable(log))


def test_decisions_are_found_by_model_and_by_request() -> None:
    log = DecisionLog()
    for at in range(6):
        request, choice = pick(1, str(at))
        log.add(msgspec.structs.replace(request, model=f"m{at % 2}"), choice, 0.0, 0.0)
    assert [decision.request_id for decision in log.last(2, model="m1")] == ["5", "3"]
    assert [decision.request_id for decision in log.last(9, request_id="4")] == ["4"]
    assert log.last(9, model="m1", request_id="4") == []


def _reachable(root: object) -> list[object]:
    """Every tuple that `root` keeps alive, classes aside."""
    found: dict[int, object] = {}
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) not in found and not isinstance(item, type):
            found[id(item)] = item
            waiting.extend(gc.get_referents(item))
    return [item for item in found.values() if isinstance(item, tuple)]
