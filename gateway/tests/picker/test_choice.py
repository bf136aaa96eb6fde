"""The decision core: who may be picked, what it costs, and that decisions repeat."""

from dataclasses import replace
from math import exp
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from picks import NOW, Known, arrivals, columns_of, cost, pick, replica, report, request, scores, slate

from penstock.api.fleet import Replica, Weights
from penstock.gateway.picker import figures, ranking
from penstock.gateway.picker.candidates import Booked, key_of, why_not
from penstock.gateway.picker.choice import RANKED, choose
from penstock.gateway.picker.columns import ARRIVALS_S, Columns
from penstock.gateway.picker.cost import HORIZON_TOKENS, cost_s, estimate, horizon
from penstock.gateway.picker.figures import PRIOR_QUEUE_S
from penstock.gateway.picker.policies import POLICIES
from penstock.gateway.picker.price import CROWDING, EVICTION
from penstock.gateway.picker.ranking import NOISE
from penstock.gateway.picker.slate import slate_of
from penstock.gateway.picker.subset import Subset, parse_subset

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

replicas = st.lists(
    st.builds(lambda at, r, t, c: replica(at, ready=r, terminating=t, cordoned=c), st.integers(1, 20), *[st.booleans()] * 3),
    unique_by=lambda r: r.uid,
)
reports = st.none() | st.builds(
    report,
    num_requests_running=st.integers(0, 64),
    num_requests_waiting=st.dictionaries(st.just("capacity"), st.integers(1, 50)),
    kv_cache_usage_perc=st.floats(0, 1),
    kv_blocks_reclaimable=st.integers(0, 1000),
    prefill_backlog_tokens=st.integers(0, 10_000),
    prefill_tokens_per_s=st.floats(0, 10_000),
    decode_step_s=st.floats(0, 1),
)
fleets = st.lists(
    st.builds(
        Known,
        st.integers(1, 9),
        report=reports,
        report_age_s=st.floats(0, 100),
        booked=st.builds(Booked, st.integers(0, 9), st.integers(0, 5000)),
        resident_tokens=st.integers(0, 399),
        last_resort=st.booleans(),
    ),
    min_size=1,
    unique_by=lambda known: known.at,
)


@pytest.mark.req("RT-40")
@given(replicas, st.sets(st.integers(1, 20)), st.none() | st.sets(st.integers(1, 20)), st.sampled_from(sorted(POLICIES)))
def test_only_ready_replicas_are_picked(fleet: list[Replica], out: set[int], subset: set[int] | None, policy: str) -> None:
    hint = None if subset is None else parse_subset([f"10.0.0.{at}" for at in subset])
    excluded = {key_of(replica(at)) for at in out}
    columns = Columns()
    columns.update(fleet)
    eligible = columns.eligible(hint, excluded)
    allowed = [r for r in fleet if why_not(r, hint, excluded) is None]
    for r in allowed:
        at = int(r.uid.removeprefix("uid-"))
        assert r.ready and not r.terminating and not r.cordoned
        assert at not in out
        assert subset is None or at in subset
    assert {columns.replicas[row] for row in np.flatnonzero(eligible)} == set(allowed)
    asked = slate_of(request(), columns, eligible, np.zeros(len(eligible)), NOW, 3)
    assert asked.candidates == len(allowed)
    if allowed:
        choice = choose(asked, policy, hint, excluded)
        assert {entry.candidate.name for entry in choice.ranked} <= {r.name for r in allowed}
        assert set(choice.endpoints) <= {r.endpoint for r in allowed}
        assert len(choice.endpoints) == min(4, len(allowed))
        assert {r.name for r in choice.rejected} == {r.name for r in fleet} - {r.name for r in allowed}


@given(fleets, st.sampled_from(sorted(POLICIES)), st.integers(0, 5), st.randoms())
def test_same_input_same_choice_whatever_the_order(fleet: list[Known], policy: str, turn: int, random: object) -> None:
    first = pick(fleet, policy, turn=turn)
    shuffled = list(fleet)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = pick(shuffled, policy, turn=turn)
    assert [r.candidate for r in again.ranked] == [r.candidate for r in first.ranked]
    assert {r.candidate.key for r in first.ranked} == {known.key for known in fleet}
    assert not first.ranked[0].candidate.last_resort or all(known.last_resort for known in fleet)
    assert first.reasons and first.endpoints[0] == first.replica.endpoint


@given(
    fleets,
    st.sampled_from(["Cost", "LeastRequest", "RoundRobin", "WeightedScore"]),
    st.integers(0, 5),
    st.none() | st.just(3),
    st.integers(0, 100),
)
def test_columns_agree_with_a_scalar_reference(
    fleet: list[Known], policy: str, turn: int, max_tokens: int | None, sent: int
) -> None:
    asked = request(max_tokens=max_tokens)
    choice = choose(slate(fleet, asked, turn, sent), policy)
    expected = scores(fleet, asked, policy, turn, sent)
    ranked = {entry.candidate.key: entry.score for entry in choice.ranked}
    assert ranked == pytest.approx(expected)
    sound = [known.key for known in fleet if not known.last_resort] or [known.key for known in fleet]
    best = min(expected[key] for key in sound)
    limit = best + max(NOISE, abs(best) * 0.02) if policy == "Cost" else best
    assert choice.key in sound
    assert expected[choice.key] <= limit + 1e-9 * abs(limit)
    good = {entry.candidate.key for entry in choice.ranked if entry.score <= choice.limit and not entry.candidate.last_resort}
    order = [entry for entry in choice.ranked if entry.candidate.key in good]
    ties = [(entry.candidate.booked.requests, -entry.candidate.resident_tokens) for entry in order]
    assert ties == sorted(ties)
    rest = [entry.score for entry in choice.ranked if not entry.candidate.last_resort and entry.candidate.key not in good]
    assert rest == sorted(rest)


@given(fleets, st.integers(0, 100))
def test_every_term_of_the_cost_agrees_and_is_finite(fleet: list[Known], sent: int) -> None:
    found = estimate(slate(fleet, sent=sent))._asdict()
    for row, known in enumerate(fleet):
        expected = cost(fleet, known, request(), sent)
        expected["itl_s"] = expected.pop("itl") / HORIZON_TOKENS
        assert {name: float(column[row]) for name, column in found.items()} == pytest.approx(expected)
        assert all(0 <= value < 1e9 for value in expected.values())


rows_of_ten = st.integers(0, 9)
changes = st.one_of(
    st.tuples(st.just("report"), rows_of_ten, reports.filter(bool), st.floats(0, 100)),
    st.tuples(st.just("booked"), rows_of_ten, st.builds(Booked, *[st.integers(0, 5000)] * 3)),
    st.tuples(st.just("restarted"), rows_of_ten),
    st.tuples(st.just("block size"), st.sampled_from([16, 32])),
    st.tuples(st.just("fleet"), st.integers(10, 14)),
)


def test_replicas_whose_names_have_one_checksum_draw_lots_of_their_own() -> None:
    columns, uids = Columns(), ("plumless", "buckeroo")  # equal by CRC-32
    columns.update([msgspec.structs.replace(replica(at), uid=uid) for at, uid in enumerate(uids)])
    assert len(set(columns.seeds.tolist())) == 2


@given(st.lists(st.lists(changes, max_size=12), max_size=4))
def test_the_quick_cost_is_the_sum_of_all_parts_whatever_has_changed(rounds: list[list[tuple[Any, ...]]]) -> None:
    columns, asked = Columns(), request()
    columns.update([replica(at) for at in range(12)])
    columns.first_token(3, 1.0, 90.0)
    columns.rates(NOW - 1)
    for between_picks in [[], *rounds]:
        columns.sent()
        for change in between_picks:
            match change:
                case "report", row, said, age_s:
                    columns.report(row, said, NOW - age_s)
                case "booked", row, booked:
                    columns.booked(row, booked)
                case "restarted", row:
                    columns.trust_again(row)
                case "block size", size:
                    asked = request(block_size=size)
                case "fleet", count:
                    columns.update([replica(at) for at in range(count)])
        one = slate_of(asked, columns, columns.open, np.arange(len(columns.replicas)) * 30.0, NOW, 0)
        whole = estimate(one).cost_s(horizon(one.request.max_tokens), one.figures.correction)
        assert cost_s(one) == pytest.approx(whole, rel=1e-9, abs=1e-12)


@given(st.lists(st.sets(st.integers(1, 9)), max_size=6), st.data())
def test_rows_are_stable_and_a_row_that_is_given_again_is_blank(steps: list[set[int]], data: st.DataObject) -> None:
    columns, rows = Columns(), {}
    for present in steps:
        columns.update([replica(at) for at in sorted(present)])
        assert {key.uid for key in columns.rows} == {f"uid-{at}" for at in present}
        for key, row in columns.rows.items():
            assert rows.get(key, row) == row
            assert (columns.figures.running[row] > 0) == (key in rows)
            held = columns.replicas[row]
            assert held is not None and key_of(held) == key
            columns.report(row, report(num_requests_running=5), 0.0)
        rows = dict(columns.rows)
        assert columns.open.sum() == len(present) == columns.open_count


@pytest.mark.req("RT-33")
def test_simultaneous_picks_on_a_stale_report_spread() -> None:
    load = report()
    booked = {at: Booked() for at in range(4)}
    for n in range(100):
        choice = pick([Known(at, report=load, report_age_s=1.0, booked=booked[at]) for at in booked], ident=str(n))
        at = int(choice.key.uid.removeprefix("uid-"))
        booked[at] = Booked(booked[at].requests + 1, booked[at].prefill_tokens + 400)
    assert max(b.requests for b in booked.values()) <= 30


@pytest.mark.req("RT-29", "RT-30")
def test_a_resident_prefix_attracts_until_its_holder_is_busier_than_the_prefill_it_saves() -> None:
    def holder(backlog: int) -> Known:
        return Known(1, report=report(prefill_backlog_tokens=backlog), resident_tokens=384)

    idle = Known(2, report=report())
    assert pick([holder(0), idle]).replica.name == "m-p-1"
    # Of 1,000 tokens a second; here, and by whoever would have to repeat what is pushed out there.
    saved = 384 * (1 + EVICTION)
    assert pick([holder(saved - 150), idle]).replica.name == "m-p-1"
    assert pick([holder(saved + 150), idle]).replica.name == "m-p-2"
    # By those who come meanwhile too, of whom few wait for 16 tokens and many for 400.
    each_s = CROWDING * arrivals([holder(0), idle], 20)
    saved = (0.4 * (1 + EVICTION) + each_s * 0.4**2 - 0.016 * EVICTION) / (1 + each_s * 0.016) - 0.016
    assert pick([holder(int(1000 * saved) - 150), idle], sent=20).replica.name == "m-p-1"
    assert pick([holder(int(1000 * saved) + 150), idle], sent=20).replica.name == "m-p-2"


@pytest.mark.req("RT-29", "RT-30")
@pytest.mark.parametrize(
    ("replicas", "speed", "prompt", "resident", "queue_s"),
    [
        (2, 20_000, 30_000, 29_500, 7.8),
        (2, 20_000, 30_000, 29_500, 180),
        (4, 5_000, 12_000, 11_500, 288),
        (8, 500, 2_500, 2_000, 600),
    ],
)
def test_no_prefix_holds_requests_at_a_long_queue_while_others_are_idle(
    replicas: int, speed: int, prompt: int, resident: int, queue_s: float
) -> None:
    roomy = {"prefill_tokens_per_s": float(speed), "kv_blocks_total": 1_000_000, "kv_blocks_reclaimable": 1_000_000}
    hot = Known(1, report=report(**roomy, prefill_backlog_tokens=int(queue_s * speed)), resident_tokens=resident)
    idle = [Known(at, report=report(**roomy)) for at in range(2, replicas + 1)]
    # As many come as all of them together can serve without any cache.
    sent = next(sent for sent in range(1000) if arrivals([hot, *idle], sent) * prompt > speed)
    assert pick([hot, *idle], tokens=prompt, sent=sent).key != hot.key


@pytest.mark.req("RT-29")
def test_where_all_have_queues_nothing_is_computed_twice() -> None:
    def holder(lead: int, queued: int) -> Known:
        return Known(1, report=report(prefill_backlog_tokens=queued + lead), resident_tokens=192)

    def other(queued: int) -> Known:
        return Known(2, report=report(prefill_backlog_tokens=queued))

    assert pick([holder(450, 0), other(0)], sent=24).replica.name == "m-p-1"
    assert pick([holder(700, 0), other(0)], sent=24).replica.name == "m-p-2"
    assert pick([holder(700, 1000), other(1000)], sent=24).replica.name == "m-p-1"
    assert pick([holder(700, 1000), other(1000)]).replica.name == "m-p-2"  # nobody waits behind it


def test_requests_are_counted_for_seconds_and_by_those_who_may_be_picked() -> None:
    columns = columns_of([Known(1), Known(2), Known(3, ready=False)], sent=100)
    assert columns.rates(NOW).arrivals == pytest.approx(100 / 2 / ARRIVALS_S * exp(-1 / ARRIVALS_S))
    assert columns.rates(NOW + 60).arrivals < 1e-4


def test_what_is_promised_is_the_time_to_the_first_token_whatever_it_costs_others() -> None:
    for known in (Known(1, report=report(prefill_backlog_tokens=900)), Known(2, booked=Booked(2, 700), resident_tokens=192)):
        choice = pick([known], sent=50)
        assert choice.ttft_s == pytest.approx(estimate(choice.slate).ttft_s[0])


@pytest.mark.req("RT-32")
def test_a_nearly_full_cache_is_avoided_although_nothing_waits() -> None:
    full = Known(1, report=report(kv_cache_usage_perc=0.98, kv_blocks_reclaimable=20, num_requests_running=8))
    busy = Known(2, report=report(kv_cache_usage_perc=0.5, kv_blocks_reclaimable=500, num_requests_running=8))
    assert pick([full, busy]).key == busy.key


@pytest.mark.req("RT-17", "XC-06")
def test_a_stale_bad_report_does_not_blacklist_and_silence_is_not_idleness() -> None:
    swamped = report(kv_cache_usage_perc=0.98, prefill_backlog_tokens=20_000, num_requests_running=8)
    moderate = report(prefill_backlog_tokens=1_000, num_requests_running=2)
    other = Known(2, report=moderate)
    assert pick([Known(1, report=swamped), other]).key == other.key
    old = Known(1, report=swamped, report_age_s=120.0)
    aged = estimate(slate([old, other])).ttft_s[0]
    assert aged < estimate(slate([Known(1, report=swamped), other])).ttft_s[0] / 10
    idle, silent = Known(3, report=report()), Known(4)
    assert estimate(slate([idle, silent])).uncertainty_s[1] >= PRIOR_QUEUE_S
    assert pick([silent, idle]).key == idle.key


@pytest.mark.req("RT-17")
def test_what_an_old_report_says_has_been_worked_on_since() -> None:
    told = report(prefill_backlog_tokens=1_000, num_requests_running=4)  # a second's work
    queues = estimate(slate([Known(at, report=told, report_age_s=age) for at, age in enumerate((0.0, 0.4, 1.5))])).queue_s
    assert queues.tolist() == pytest.approx([1.0, 0.6, 0.0])


@pytest.mark.req("RT-17", "RT-44")
def test_a_replica_that_was_heard_once_is_later_taken_to_be_like_the_others() -> None:
    busy = report(prefill_backlog_tokens=2_000, num_requests_running=8, decode_step_s=0.04)
    fresh, old, never = Known(1, report=busy), Known(2, report=report(decode_step_s=0.01), report_age_s=200.0), Known(3)
    cost = estimate(slate([fresh, old, never]))
    assert cost.ttft_s[1] == pytest.approx(cost.ttft_s[0], rel=1e-3) == pytest.approx(cost.ttft_s[2], rel=1e-3)
    assert cost.itl_s.tolist() == pytest.approx([0.04 * 25 / 24] * 3, rel=1e-3)
    quiet = estimate(slate([Known(1, report=report()), Known(2, report=report(), report_age_s=200.0), never]))
    assert quiet.uncertainty_s.tolist() == pytest.approx([0.0, 0.0, PRIOR_QUEUE_S], rel=1e-3), "silence alone is no queue"


def test_a_batch_that_has_shrunk_since_its_step_was_measured_is_quicker() -> None:
    fleet = [Known(at, report=report(num_requests_running=16)) for at in range(2)]
    columns = columns_of(fleet)
    for _ in range(16):
        columns.left(0)
    asked = slate_of(request(), columns, columns.open, np.zeros(2), NOW, 0)
    assert estimate(asked).itl_s.tolist() == pytest.approx([0.01 * 17 / 32, 0.01 * 33 / 32])
    assert cost_s(asked)[0] < cost_s(asked)[1]


def test_a_full_replica_costs_the_wait_for_a_row() -> None:
    full = Known(1, report=report(num_requests_running=64, num_requests_waiting={"capacity": 3}))
    assert estimate(slate([full])).capacity_s[0] == pytest.approx(4 * 256 * 0.01 / 64)


def test_the_fallback_list_is_ordered_and_stays_in_the_pool_of_the_pick() -> None:
    loads = [Known(at, report=report(prefill_backlog_tokens=1000 * at)) for at in range(1, 7)]
    stranger = replace(loads[1], pool="default/m/other")
    choice = pick([loads[0], stranger, *loads[2:]])
    assert choice.endpoints == ["10.0.0.1:8000", "10.0.0.3:8000", "10.0.0.4:8000", "10.0.0.5:8000"]


def test_the_fallback_list_looks_beyond_the_ranked_for_replicas_of_the_picks_pool() -> None:
    """Nine replicas of another pool rank before the second of the pick's pool."""
    loads = [Known(at, report=report(prefill_backlog_tokens=1000 * at)) for at in range(1, 21)]
    others = [replace(known, pool="default/m/other") for known in loads[1:14]]
    choice = pick([loads[0], *others, replace(loads[14], ready=False), *loads[15:]])
    assert len(choice.rows) == RANKED and {known.name for known in others} >= {r.candidate.name for r in choice.ranked[1:]}
    assert choice.endpoints == [f"10.0.0.{at}:8000" for at in (1, 16, 17, 18)]
    choice = pick([loads[0], *others, *loads[18:]])
    assert choice.endpoints == [f"10.0.0.{at}:8000" for at in (1, 19, 20)], "the pool has no more"


def test_a_last_resort_comes_last_and_yet_serves_alone() -> None:
    spent = Known(1, report=report(), last_resort=True)
    busy = Known(2, report=report(prefill_backlog_tokens=9_000))
    assert [r.candidate.name for r in pick([spent, busy]).ranked] == ["m-p-2", "m-p-1"]
    assert pick([spent]).key == spent.key


@pytest.mark.req("RT-28")
def test_weighted_score_crosses_over_exactly_where_the_weights_say() -> None:
    # 3·(200/400) − 2·u against −2·0.2: equal at u = 0.95.
    idle = Known(2, report=report(kv_cache_usage_perc=0.2))
    for usage, winner in ((0.94, "m-p-1"), (0.96, "m-p-2")):
        holder = Known(1, report=report(kv_cache_usage_perc=usage), resident_tokens=200)
        assert pick([holder, idle], "WeightedScore").replica.name == winner


@pytest.mark.req("RT-28")
def test_the_models_weights_move_the_crossing() -> None:
    holder = Known(1, report=report(kv_cache_usage_perc=0.9), resident_tokens=200)
    fleet = [holder, Known(2, report=report(kv_cache_usage_perc=0.2))]
    for weights, winner in (
        (Weights(), "m-p-1"),
        (Weights(prefix=1), "m-p-2"),
        (Weights(kv=5), "m-p-2"),
        (Weights(kv=0), "m-p-1"),
    ):
        assert choose(msgspec.structs.replace(slate(fleet), weights=weights), "WeightedScore").replica.name == winner


@pytest.mark.req("RT-45")
def test_baselines_do_what_they_are_called() -> None:
    loads = [Known(at, report=report(num_requests_running=at)) for at in range(3)]
    assert [pick(loads, "RoundRobin", turn=turn).replica.name for turn in range(4)] == ["m-p-0", "m-p-1", "m-p-2", "m-p-0"]
    assert pick(loads, "LeastRequest").replica.name == "m-p-0"
    drawn = [pick(loads, "PowerOfTwo", ident=str(n)).replica.name for n in range(300)]
    assert drawn.count("m-p-2") == 0  # never the fewer of two
    assert 0.5 < drawn.count("m-p-0") / 300 < 0.83
    anywhere = [pick(loads, "Random", ident=str(n)).replica.name for n in range(300)]
    assert min(map(anywhere.count, set(anywhere))) > 60


def test_costs_that_differ_by_noise_are_ties_broken_by_bookings_then_residency_then_lot() -> None:
    fast = report(prefill_tokens_per_s=1e6)
    holder, other = Known(1, report=fast, resident_tokens=384), Known(2, report=fast)
    for n in range(20):
        choice = pick([holder, other], ident=str(n))
        assert choice.key == holder.key
        assert "as good as equal, and m-p-1 holds more of the prompt" in choice.reasons[0]
    booked = replace(holder, booked=Booked(1, 16))
    assert pick([booked, other]).key == other.key
    twins = [Known(1, report=fast), other]
    assert {pick(twins, ident=str(n)).replica.name for n in range(20)} == {"m-p-1", "m-p-2"}
    assert "by lot" in pick(twins).reasons[0]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from((0, 16, 32)), st.booleans()), min_size=1, max_size=40),
    st.sampled_from(sorted(POLICIES)),
)
def test_few_rows_and_many_are_ranked_alike(fleet: list[tuple[int, int, bool]], policy: str) -> None:
    known = [
        Known(at, report(), booked=Booked(requests), resident_tokens=tokens, last_resort=last)
        for at, (requests, tokens, last) in enumerate(fleet, 1)
    ]
    choices = []
    for few in (0, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(figures, "FEW", few)
            patch.setattr(ranking, "FEW", few)
            choices.append(pick(known, policy))
    one, other = choices
    assert (one.rows, one.scores, one.endpoints) == (other.rows, other.scores, other.endpoints)
    rows = range(len(one.whole.replicas))
    assert one.whole.lots_of_few(rows) == one.whole.lots(np.array(rows)).tolist()


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'Costly' does not exist; there are Cost"):
        pick([Known(1)], "Costly")


def test_reasons_name_the_term_that_decided() -> None:
    choice = pick([Known(1, report=report()), Known(2, report=report(prefill_backlog_tokens=5_000))])
    assert "mostly by queue_s: 0 against 5" in choice.reasons[0]
    guessed = choose(slate([Known(1)], request(tokens_unknown="no prompt bundle yet")), "Cost")
    assert "chosen without residency: no prompt bundle yet" in guessed.reasons


@pytest.mark.req("RT-41")
@pytest.mark.parametrize(
    ("hint", "allowed"),
    [
        (["10.0.0.1:8000"], {1}),
        ("10.0.0.1:8000, 10.0.0.2", {1, 2}),
        (["10.0.0.1:8000,10.0.0.2:9"], {1}),
        (["10.0.0.1", "[10.0.0.2]:8000"], {1, 2}),
        ([], set()),
        ("", set()),
        (7.0, set()),
        ([{"a": 1}, None, True], set()),
        (["10.0.0.1:x", "10.0.0.2:8000:1", "host"], set()),
        (["[10.0.0.1", "[10.0.0.2:8000"], set()),
        (["10.0.0.1:" + "9" * 5000, "10.0.0.2:8000"], {2}),
    ],
)
def test_subset_hints_are_read_in_every_form_and_never_fail_open(hint: object, allowed: set[int]) -> None:
    subset = parse_subset(hint)
    assert {at for at in range(1, 5) if subset.allows(replica(at))} == allowed


def test_subset_hints_read_ipv6() -> None:
    six = msgspec.structs.replace(replica(1), host="fd00::1")
    assert parse_subset("[FD00:0::1]:8000").allows(six)
    assert parse_subset("fd00::1").allows(six)
    assert not parse_subset("[fd00::1]:8001").allows(six)
    assert not Subset(frozenset(), frozenset()).allows(six)


def test_who_draws_the_same_lot_comes_in_the_same_order_however_many_there_are() -> None:
    known = slate([Known(at) for at in range(1, 41)])
    alike = msgspec.structs.replace(known, seeds=np.arange(40, dtype=np.uint64) % np.uint64(3))
    rows = choose(alike, "Cost").rows
    assert rows == list(range(rows[0], 40, 3))[:RANKED]
