"""The log of decisions: kept as figures, written out when somebody reads it."""

import gc

import msgspec

from penstock.api.load_report import LoadReport
from penstock.gateway.extproc.decisions import CANDIDATES_KEPT, KEPT, DecisionLog
from penstock.gateway.picker.candidates import Candidate, Rejected, ReplicaKey
from penstock.gateway.picker.choice import MAX_ENDPOINTS, Choice, choose
from penstock.gateway.picker.cost import common_rates, estimate
from penstock.gateway.picker.request import Prompt, RequestView

REQUEST = RequestView(id="r", path="/v1/completions", model="m", prompts=(Prompt(40, (b"\x07" * 32,) * 2),))
REJECTED = [Rejected(f"gone-{at}", "not ready") for at in range(20)]


def pick(replicas: int, ident: str = "r") -> tuple[RequestView, list[Candidate], Choice]:
    candidates = [
        Candidate(
            key=ReplicaKey(f"uid-{at}", 8000),
            name=f"m-p-{at}",
            pool="ns/m/p",
            endpoint=f"10.0.0.{at}:8000",
            report=LoadReport(epoch=1, seq=1, prefill_backlog_tokens=1000 * at),
        )
        for at in range(replicas)
    ]
    request = msgspec.structs.replace(REQUEST, id=ident)
    return request, candidates, choose(request, candidates, REJECTED, "Cost", 0)


def test_a_decision_is_shown_with_every_term_of_its_best_candidates() -> None:
    request, candidates, choice = pick(CANDIDATES_KEPT + 5)
    log = DecisionLog()
    log.add(request, choice, 0.25, 1e9)
    (decision,) = log.last(1)
    assert (decision.request_id, decision.picked, decision.waited_s, decision.time) == ("r", "m-p-0", 0.25, 1e9)
    assert decision.endpoints == [f"10.0.0.{at}:8000" for at in range(MAX_ENDPOINTS)]
    assert [scored.name for scored in decision.candidates] == [f"m-p-{at}" for at in range(CANDIDATES_KEPT)]
    assert len(decision.rejected) == CANDIDATES_KEPT
    assert decision.reasons == choice.reasons
    for candidate, scored in zip(candidates, decision.candidates, strict=False):
        cost = estimate(request, candidate, common_rates(candidates))
        assert scored.terms == {**msgspec.structs.asdict(cost), "ttft_s": cost.ttft_s}
        assert scored.score == cost.cost_s(None)


def test_the_last_decisions_are_kept_newest_first_and_no_prompts_with_them() -> None:
    log = DecisionLog()
    for at in range(KEPT + 3):
        request, _, choice = pick(1, str(at))
        log.add(request, choice, 0.0, 0.0)
    assert [decision.request_id for decision in log.last(2)] == [str(KEPT + 2), str(KEPT + 1)]
    assert len(log.last(10 * KEPT)) == KEPT
    assert REQUEST.prompts in _reachable(request) and REQUEST.prompts not in _reachable(log)


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
