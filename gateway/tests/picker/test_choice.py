"""The decision core: who may be picked, what it costs, and that decisions repeat."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.fleet import Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import Booked, Candidate, ReplicaKey, eligible, key_of
from penstock.gateway.picker.choice import Choice, choose
from penstock.gateway.picker.cost import PRIOR_QUEUE_S, common_rates, estimate
from penstock.gateway.picker.policies import POLICIES
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.subset import Subset, parse_subset

POOL = "default/m/p"


def replica(at: int, *, ready: bool = True, terminating: bool = False, cordoned: bool = False) -> Replica:
    return Replica(
        uid=f"uid-{at}",
        name=f"m-p-{at}",
        pool=POOL,
        host=f"10.0.0.{at}",
        port=8000,
        events_port=5557,
        replay_port=5558,
        ready=ready,
        terminating=terminating,
        cordoned=cordoned,
    )


def candidate(at: int, **fields: object) -> Candidate:
    return Candidate(key=ReplicaKey(f"uid-{at}", 8000), name=f"m-p-{at}", pool=POOL, endpoint=f"10.0.0.{at}:8000", **fields)


def report(**fields: object) -> LoadReport:
    defaults = {
        "epoch": 1,
        "seq": 1,
        "max_num_seqs": 64,
        "kv_blocks_total": 1000,
        "kv_blocks_reclaimable": 1000,
        "prefill_tokens_per_s": 1000.0,
        "decode_step_s": 0.01,
    }
    return LoadReport(**{**defaults, **fields})


def request(tokens: int = 400, ident: str = "r", **fields: object) -> RequestView:
    return RequestView(id=ident, path="/v1/completions", model="m", prompts=(Prompt(tokens),), **fields)


def pick(candidates: list[Candidate], policy: str = "Cost", ident: str = "r", tokens: int = 400, turn: int = 0) -> Choice:
    return choose(request(tokens, ident), candidates, [], policy, turn)


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
candidates = st.lists(
    st.builds(
        candidate,
        st.integers(1, 9),
        report=reports,
        report_age_s=st.floats(0, 100),
        booked=st.builds(Booked, st.integers(0, 9), st.integers(0, 5000)),
        resident_tokens=st.integers(0, 399),
        suspect=st.booleans(),
    ),
    min_size=1,
    unique_by=lambda c: c.key,
)


@pytest.mark.req("RT-40")
@given(replicas, st.sets(st.integers(1, 20)), st.none() | st.sets(st.integers(1, 20)))
def test_only_ready_replicas_may_be_picked(fleet: list[Replica], excluded: set[int], subset: set[int] | None) -> None:
    hint = None if subset is None else parse_subset([f"10.0.0.{at}" for at in subset])
    allowed, rejected = eligible(fleet, subset=hint, excluded={key_of(replica(at)) for at in excluded})
    for r in allowed:
        at = int(r.uid.removeprefix("uid-"))
        assert r.ready and not r.terminating and not r.cordoned
        assert at not in excluded
        assert subset is None or at in subset
    assert len(allowed) + len(rejected) == len(fleet)


@given(candidates, st.sampled_from(sorted(POLICIES)), st.integers(0, 5), st.randoms())
def test_same_input_same_choice_whatever_the_order(cs: list[Candidate], policy: str, turn: int, random: object) -> None:
    first = pick(cs, policy, turn=turn)
    shuffled = list(cs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = pick(shuffled, policy, turn=turn)
    assert [r.candidate.key for r in again.ranked] == [r.candidate.key for r in first.ranked]
    assert {r.candidate.key for r in first.ranked} == {c.key for c in cs}
    assert not first.picked.suspect or all(c.suspect for c in cs)
    assert first.reasons and first.endpoints[0] == first.picked.endpoint


@given(candidates)
def test_costs_are_finite_and_not_negative(cs: list[Candidate]) -> None:
    for c in cs:
        cost = estimate(request(), c, common_rates(cs))
        assert all(0 <= value < 1e7 for value in msgspec.structs.asdict(cost).values())


@pytest.mark.req("RT-33")
def test_simultaneous_picks_on_a_stale_report_spread() -> None:
    load = report()
    booked = {at: Booked() for at in range(4)}
    for n in range(100):
        choice = pick([candidate(at, report=load, report_age_s=1.0, booked=booked[at]) for at in booked], ident=str(n))
        at = int(choice.picked.key.uid.removeprefix("uid-"))
        booked[at] = Booked(booked[at].requests + 1, booked[at].prefill_tokens + 400)
    assert max(b.requests for b in booked.values()) <= 30


@pytest.mark.req("RT-29", "RT-30")
def test_a_resident_prefix_attracts_until_its_holder_is_busier_than_the_prefill_it_saves() -> None:
    def holder(backlog: int) -> Candidate:
        return candidate(1, report=report(prefill_backlog_tokens=backlog), resident_tokens=384)

    idle = candidate(2, report=report())
    assert pick([holder(0), idle]).picked.name == "m-p-1"
    assert pick([holder(300), idle]).picked.name == "m-p-1"
    assert pick([holder(500), idle]).picked.name == "m-p-2"  # 384 tokens saved, 500 in the way


@pytest.mark.req("RT-32")
def test_a_nearly_full_cache_is_avoided_although_nothing_waits() -> None:
    full = candidate(1, report=report(kv_cache_usage_perc=0.98, kv_blocks_reclaimable=20, num_requests_running=8))
    busy = candidate(2, report=report(kv_cache_usage_perc=0.5, kv_blocks_reclaimable=500, num_requests_running=8))
    assert pick([full, busy]).picked is busy


@pytest.mark.req("RT-17")
def test_a_stale_bad_report_does_not_blacklist_and_silence_is_not_idleness() -> None:
    swamped = report(kv_cache_usage_perc=0.98, prefill_backlog_tokens=20_000, num_requests_running=8)
    moderate = report(prefill_backlog_tokens=1_000, num_requests_running=2)
    other = candidate(2, report=moderate)
    assert pick([candidate(1, report=swamped), other]).picked is other
    old = candidate(1, report=swamped, report_age_s=120.0)
    rates = common_rates([old, other])
    assert estimate(request(), old, rates).ttft_s < estimate(request(), candidate(1, report=swamped), rates).ttft_s / 10
    idle = candidate(3, report=report())
    silent = candidate(4)
    assert estimate(request(), silent, common_rates([idle, silent])).uncertainty_s >= PRIOR_QUEUE_S
    assert pick([silent, idle]).picked is idle


def test_a_full_replica_costs_the_wait_for_a_row() -> None:
    full = candidate(1, report=report(num_requests_running=64, num_requests_waiting={"capacity": 3}))
    cost = estimate(request(), full, common_rates([full]))
    assert cost.capacity_s == pytest.approx(4 * 256 * 0.01 / 64)


def test_the_fallback_list_is_ordered_and_stays_in_the_pool_of_the_pick() -> None:
    loads = [candidate(at, report=report(prefill_backlog_tokens=1000 * at)) for at in range(1, 7)]
    stranger = msgspec.structs.replace(loads[1], pool="default/m/other")
    choice = pick([loads[0], stranger, *loads[2:]])
    assert choice.endpoints == ["10.0.0.1:8000", "10.0.0.3:8000", "10.0.0.4:8000", "10.0.0.5:8000"]


def test_a_suspect_comes_last_and_yet_serves_alone() -> None:
    suspect = candidate(1, report=report(), suspect=True)
    busy = candidate(2, report=report(prefill_backlog_tokens=9_000))
    assert [r.candidate.name for r in pick([suspect, busy]).ranked] == ["m-p-2", "m-p-1"]
    assert pick([suspect]).picked is suspect


@pytest.mark.req("RT-28")
def test_weighted_score_crosses_over_exactly_where_the_weights_say() -> None:
    # 3·(200/400) − 2·u against −2·0.2: equal at u = 0.95.
    idle = candidate(2, report=report(kv_cache_usage_perc=0.2))
    for usage, winner in ((0.94, "m-p-1"), (0.96, "m-p-2")):
        holder = candidate(1, report=report(kv_cache_usage_perc=usage), resident_tokens=200)
        assert pick([holder, idle], "WeightedScore").picked.name == winner


@pytest.mark.req("RT-45")
def test_baselines_do_what_they_are_called() -> None:
    loads = [candidate(at, report=report(num_requests_running=at)) for at in range(3)]
    assert [pick(loads, "RoundRobin", turn=turn).picked.name for turn in range(4)] == ["m-p-0", "m-p-1", "m-p-2", "m-p-0"]
    assert pick(loads, "LeastRequest").picked.name == "m-p-0"
    drawn = [pick(loads, "PowerOfTwo", ident=str(n)).picked.name for n in range(300)]
    assert drawn.count("m-p-2") == 0  # never the fewer of two
    assert 0.5 < drawn.count("m-p-0") / 300 < 0.83
    anywhere = [pick(loads, "Random", ident=str(n)).picked.name for n in range(300)]
    assert min(map(anywhere.count, set(anywhere))) > 60


def test_costs_that_differ_by_noise_are_ties_broken_by_bookings_then_residency_then_lot() -> None:
    fast = report(prefill_tokens_per_s=1e6)
    holder, other = candidate(1, report=fast, resident_tokens=384), candidate(2, report=fast)
    for n in range(20):
        choice = pick([holder, other], ident=str(n))
        assert choice.picked is holder
        assert "as good as equal, and m-p-1 holds more of the prompt" in choice.reasons[0]
    booked = msgspec.structs.replace(holder, booked=Booked(1, 16))
    assert pick([booked, other]).picked is other
    twins = [candidate(1, report=fast), other]
    assert {pick(twins, ident=str(n)).picked.name for n in range(20)} == {"m-p-1", "m-p-2"}
    assert "by lot" in pick(twins).reasons[0]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'Costly' does not exist; there are Cost"):
        pick([candidate(1)], "Costly")


def test_reasons_name_the_term_that_decided() -> None:
    choice = pick([candidate(1, report=report()), candidate(2, report=report(prefill_backlog_tokens=5_000))])
    assert "mostly by queue_s: 0 against 5" in choice.reasons[0]
    guessed = choose(request(tokens_unknown="no prompt bundle yet"), [candidate(1)], [], "Cost", 0)
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
