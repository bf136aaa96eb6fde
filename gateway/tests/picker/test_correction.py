"""Promised against taken times to the first token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from picks import NOW, report

from penstock.api.events import RequestFinished
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.choice import Choice, choose
from penstock.gateway.picker.correction import HALF_LIFE_S, LEAST, MOST, corrections
from penstock.gateway.picker.cost import HORIZON_TOKENS
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

MODEL = Model(id="d/m", served_names=["m"])
KEYS = [ReplicaKey(f"u{number}", 8000) for number in range(3)]

seconds = st.floats(0.0, 1e6)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8), st.floats(0.1, 10.0))
def test_the_factor_is_bounded_and_an_error_that_all_share_is_none(sums: list[tuple[float, float]], shared: float) -> None:
    promised, taken = np.array(sums).T
    factors = corrections(promised, taken)
    assert ((factors >= LEAST) & (factors <= MOST)).all()
    assert corrections(promised[:1], taken[:1]) == pytest.approx(1.0)
    large = np.full(4, 1e6)
    assert corrections(large, shared * large) == pytest.approx(1.0)


def test_what_is_tolerated_is_no_fault_and_beyond_it_the_factor_grows_without_a_jump() -> None:
    promised = np.full(3, 1e9)  # so that the prior says nothing

    def of(factor: float) -> list[float]:
        return [float(it) for it in corrections(promised, promised * np.array([1.0, 1.0, factor]))]

    for factor, corrected in ((1.0, 1.0), (1.9, 1.0), (2.0, 1.0), (3.0, 2.25), (4.0, 4.0), (10.0, 10.0), (40.0, MOST)):
        assert of(factor) == pytest.approx([1.0, 1.0, corrected]), factor
    for factor, corrected in ((0.6, 1.0), (0.4, 0.64), (0.36, 0.5184), (0.1, LEAST)):
        assert of(factor) == pytest.approx([1.0, 1.0, corrected]), factor


def fleet() -> FleetState:
    state = FleetState()
    members = [
        Replica(uid=key.uid, name=key.uid, pool="d/m/p", host=f"10.0.0.{at}", port=8000, events_port=1, replay_port=2, ready=True)
        for at, key in enumerate(KEYS)
    ]
    state.update(Fleet(models=[MODEL], pools=[Pool(id="d/m/p", model="d/m")], replicas=members))
    for key in KEYS:
        state.reported(key, report(num_requests_running=8, prefill_backlog_tokens=3000), NOW)
    return state


def pick(state: FleetState, name: str, now: float, tokens: int = 2000) -> Choice:
    request = RequestView(id=name, path="", model="m", prompts=(Prompt(tokens),))
    choice = choose(state.slates.of(MODEL, request, now), "Cost")
    state.routed(MODEL, request, choice.key, choice.resident_tokens, now, choice.ttft_s)
    return choice


def with_one_late(factor: float) -> tuple[FleetState, ReplicaKey]:
    """A fleet that nobody has picked from here, in which each replica has answered as many requests, and one took `factor` times
    as long as it promised."""
    state, late, promised_s = fleet(), KEYS[0], 4.0
    for turn in range(4):
        for key in KEYS:
            request = RequestView(id=f"{turn} {key.uid}", path="", model="m", prompts=(Prompt(2000),))
            state.routed(MODEL, request, key, 0, NOW, promised_s)
            taken_s = promised_s * (factor if key == late else 1.0)
            state.event(key, RequestFinished(request.id, "stop", 2000, 0, 5, ttft_s=taken_s), NOW)
    return state, late


@pytest.mark.parametrize("age", [0.0, 7.0])
def test_what_the_pick_promises_is_the_estimate_before_any_correction(age: float) -> None:
    state = fleet()
    first = pick(state, "r", NOW + age)
    assert first.ttft_s == pytest.approx(first.ranked[0].terms["ttft_s"])
    state.event(first.key, RequestFinished("r", "stop", 2000, 0, 5, ttft_s=30 * first.ttft_s), NOW + age)
    again = pick(state, "r2", NOW + age + 1)
    assert again.ttft_s == pytest.approx(again.ranked[0].terms["ttft_s"])


def test_a_late_first_token_sends_the_next_request_elsewhere_until_it_is_forgotten() -> None:
    state, late = with_one_late(10.0)
    others = [key for key in KEYS if key != late]
    for turn in range(20, 30):
        assert pick(state, f"r{turn}", NOW + 1).key in others
    assert 2 < state.correction(late) <= MOST
    for key in KEYS:
        state.reported(key, report(seq=2, num_requests_running=8, prefill_backlog_tokens=3000), NOW + 20 * HALF_LIFE_S)
    pick(state, "later", NOW + 20 * HALF_LIFE_S)
    assert state.correction(late) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("ttft_s", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_no_absurd_time_leaves_a_figure_that_cannot_be_reckoned_with(ttft_s: float) -> None:
    state = fleet()
    choice = pick(state, "r", NOW)
    state.event(choice.key, RequestFinished("r", "stop", 2000, 0, 5, ttft_s=ttft_s), NOW)
    pick(state, "s", NOW + 1)
    assert LEAST <= state.correction(choice.key) <= MOST
    assert sum(state.beliefs.truth.models["d/m"].ttft_buckets) == (ttft_s == 1e300)


def test_a_new_process_starts_without_a_record() -> None:
    state, late = with_one_late(10.0)
    pick(state, "s", NOW + 1)
    assert state.correction(late) > 2
    state.restarted(late)
    assert state.correction(late) == 1.0
    pick(state, "t", NOW + 2)
    assert state.correction(late) == 1.0


def test_the_terms_of_a_corrected_replica_add_up_to_its_cost() -> None:
    state, late = with_one_late(6.0)
    ranked = {row.candidate.key: row for row in pick(state, "next", NOW + 1).ranked}
    assert state.correction(late) > 2
    for key, row in ranked.items():
        terms = row.terms
        others_s = terms["eviction_s"] + terms["crowding_s"]
        whole = terms["ttft_s"] + others_s + terms["correction_s"] + HORIZON_TOKENS * terms["itl_s"]
        assert whole == pytest.approx(row.score), key
    corrected = {key: row.terms["correction_s"] for key, row in ranked.items()}
    assert corrected[late] > max(seconds for key, seconds in corrected.items() if key != late) + 0.1
