"""What is known of the fleet over time."""

import os
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.events import AllBlocksCleared, BlockStored, RequestFinished
from penstock.api.fleet import Fleet, Model, Pool, Replica, Role
from penstock.api.load_report import LoadReport
from penstock.gateway.load.reports import GONE_S
from penstock.gateway.picker.bookings import State
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.choice import choose
from penstock.gateway.picker.outliers import BASE_S
from penstock.gateway.picker.pooled import pools_view
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

MODEL = Model(id="ns/m", served_names=["m"])


def replica(at: int, pool: str = "ns/m/p") -> Replica:
    return Replica(
        uid=f"u{at}",
        name=f"r{at}",
        pool=pool,
        host=f"10.0.{at // 250}.{at % 250}",
        port=8000,
        events_port=1,
        replay_port=2,
        ready=True,
    )


def fleet(*replicas: Replica, role: Role = "Both") -> Fleet:
    pools = [Pool(id="ns/m/p", model=MODEL.id, role=role), Pool(id="ns/m/q", model=MODEL.id)]
    return Fleet(models=[MODEL], pools=pools, replicas=list(replicas))


def request(*prompts: Prompt, id: str = "r") -> RequestView:
    return RequestView(id=id, path="", model="m", prompts=prompts or (Prompt(10),))


def test_residency_is_of_full_blocks_and_never_the_last_token() -> None:
    state = FleetState()
    state.update(fleet(replica(1)))
    state.event(key_of(replica(1)), BlockStored([b"a", b"b"]), 0.0)
    assert state.slates.of(MODEL, request(Prompt(32, (b"a", b"b"))), 0.0).resident == [16]
    several = request(Prompt(40, (b"a", b"b")), Prompt(20, (b"a",)), Prompt(20, (b"x",)))
    assert state.slates.of(MODEL, several, 0.0).resident == [32 + 16]
    assert state.slates.of(MODEL, request(Prompt(32, (b"a", b"b"))), 0.0, comparable=()).resident == [0]


@pytest.mark.req("RT-14")
def test_prefill_replicas_get_no_whole_requests() -> None:
    state = FleetState()
    state.update(fleet(replica(1), replica(2, "ns/m/q"), role="Prefill"))
    slate = state.slates.of(MODEL, request(), 0.0)
    assert [replica.name for replica in slate.replicas if replica] == ["r2"]


def test_a_replica_that_comes_back_under_its_uid_has_no_past() -> None:
    state = FleetState()
    key = key_of(replica(1))
    state.update(fleet(replica(1)))
    state.event(key, BlockStored([b"a"]), 0.0)
    state.reported(key, LoadReport(epoch=1, seq=1), 0.0)
    state.bookings.book("r", key, 5, 0.0)
    state.update(fleet())
    state.update(fleet(replica(1)))
    slate = state.slates.of(MODEL, request(Prompt(17, (b"a",))), 0.0)
    assert (slate.figures.heard_at, slate.figures.booked_requests, slate.resident) == (-float("inf"), 0, 0)
    assert state.bookings.released == {"replica_gone": 1}


@pytest.mark.req("XC-06")
def test_reports_of_any_carrier_and_order_leave_the_newest() -> None:
    state = FleetState()
    key = key_of(replica(1))
    state.update(fleet(replica(1)))
    for epoch, seq in ((1, 5), (1, 4), (2, 0), (1, 9)):
        state.reported(key, LoadReport(epoch=epoch, seq=seq), 1.0)
    heard = state.reports.get(key)
    assert heard is not None
    assert (heard.report.epoch, heard.report.seq) == (2, 0)


def test_a_process_whose_clock_was_set_back_counts_when_the_old_one_is_silent() -> None:
    state = FleetState()
    key = key_of(replica(1))
    state.update(fleet(replica(1)))
    state.reported(key, LoadReport(epoch=1_000, seq=9), 10.0)
    booking = state.bookings.book("r", key, 10, 10.0)
    state.reported(key, LoadReport(epoch=5, seq=0), 11.0)  # as a late word of an older process would be
    assert booking.state is not State.RELEASED
    state.reported(key, LoadReport(epoch=5, seq=1), 10.0 + GONE_S)
    heard = state.reports.get(key)
    assert heard is not None and heard.report.epoch == 5
    assert booking.state is State.RELEASED, "what the old one ran is gone"


def test_what_strangers_say_is_ignored() -> None:
    state = FleetState()
    state.update(fleet())
    stranger = key_of(replica(9))
    for event in (BlockStored([b"a"]), RequestFinished("r", "stop", 1, 0, 1), LoadReport(epoch=1, seq=1)):
        state.event(stranger, event, 0.0)
    assert len(state.residency) == 0
    assert state.reports.get(stranger) is None


def test_an_ejection_passes_with_time_and_with_a_word() -> None:
    state = FleetState()
    key = key_of(replica(1))
    state.update(fleet(replica(1)))

    def last_resort(now: float) -> bool:
        return choose(state.slates.of(MODEL, request(), now), "Cost").ranked[0].candidate.last_resort

    state.unreachable(key, 10.0)
    assert last_resort(10.1)
    assert not last_resort(10.0 + BASE_S)
    state.unreachable(key, 20.0)
    state.reported(key, LoadReport(epoch=1, seq=1), 20.1)
    assert not last_resort(20.2)


def test_a_replica_that_was_stopped_meets_no_herd_when_it_goes_on() -> None:
    state = FleetState()
    state.update(fleet(replica(1), replica(2)))
    stopped, other = key_of(replica(1)), key_of(replica(2))
    for key, running in ((stopped, 0), (other, 50)):  # the stopped one looks idle, and is
        state.reported(key, LoadReport(epoch=1, seq=1, num_requests_running=running, decode_step_s=0.05), 10.0)

    def burst(now: float) -> Counter[ReplicaKey]:
        keys: list[ReplicaKey] = []
        for n in range(20):
            choice = choose(state.slates.of(MODEL, request(id=f"{now}-{n}"), now), "Cost")
            state.bookings.book(f"{now}-{n}", choice.key, 0, now)
            keys.append(choice.key)
        return Counter(keys)

    state.unreachable(stopped, 12.0)
    assert burst(12.1)[stopped] == 0
    state.reported(stopped, LoadReport(epoch=1, seq=2), 12.5)  # it goes on
    assert burst(12.6)[stopped] == 1
    state.answered(stopped, 12.7, error=False)
    assert burst(12.8)[stopped] == 1  # two on their way, counting the first


def test_pools_show_reports_holds_and_never_a_report_that_was_not_heard() -> None:
    state = FleetState()
    state.update(fleet(replica(1), replica(2, "ns/m/q")))
    state.reported(key_of(replica(1)), LoadReport(epoch=1, seq=1), 1.0)
    version = state.version
    state.hold_began(MODEL)
    view = pools_view(state, "gw", 3.0)
    assert view.version == version + 1
    assert [(pool.id, pool.held) for pool in view.pools] == [("ns/m/p", 1), ("ns/m/q", 0)]
    first, second = view.pools[0].replicas[0], view.pools[1].replicas[0]
    assert first.report_age_s == 2.0
    assert (second.report, second.report_age_s) == (None, None)
    state.hold_ended(MODEL)
    assert [pool.held for pool in pools_view(state, "gw", 3.0).pools] == [0, 0]


@pytest.mark.req("RT-42")
def test_a_pick_among_a_hundred_replicas_of_8k_tokens_takes_less_than_to_look_at_each_block_of_each() -> None:
    """About a millisecond on the reference machine, where 51,200 looks take three: the same in a slower one's time."""
    state = FleetState()
    replicas = [replica(at) for at in range(100)]
    state.update(fleet(*replicas))
    hashes = [os.urandom(32) for _ in range(512)]
    for at, one in enumerate(replicas):
        state.event(key_of(one), BlockStored(hashes[: at * 5]), 0.0)
        state.reported(key_of(one), LoadReport(epoch=1, seq=1, num_requests_running=at % 9, max_num_seqs=64), 0.0)
    asked = request(Prompt(8192, tuple(hashes)))
    cached = [set(hashes[: at * 5]) for at in range(100)]

    def look() -> int:
        found = 0
        for one in cached:
            for block in hashes:
                if block in one:
                    found += 1
        return found

    def pick() -> object:
        return choose(state.slates.of(MODEL, asked, 0.5), "Cost")

    def seconds(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    taken = [(seconds(pick), seconds(look)) for _ in range(20)]
    assert min(picked for picked, _ in taken) < min(looked for _, looked in taken)


@given(st.data())
def test_resident_tokens_agree_with_a_walk_for_each_replica(data: st.DataObject) -> None:
    """Through replicas that come, go, are emptied and belong to other models, whose bits and rows differ."""
    other = Model(id="ns/n", served_names=["n"])
    pools = [Pool(id="ns/m/p", model=MODEL.id), Pool(id="ns/n/p", model=other.id)]
    state, cached = FleetState(), dict[int, set[bytes]]()
    chain = [bytes([at]) * 32 for at in range(6)]
    for _ in range(data.draw(st.integers(1, 4))):
        present = data.draw(st.sets(st.integers(0, 39), max_size=40))
        replicas = [replica(at, "ns/n/p" if at % 5 == 0 else "ns/m/p") for at in sorted(present)]
        state.update(Fleet(models=[MODEL, other], pools=pools, replicas=replicas))
        cached = {at: cached.get(at, set()) for at in present}
        for at in present:
            if data.draw(st.booleans()):
                state.event(key_of(replica(at)), AllBlocksCleared(), 0.0)
                cached[at] = set()
            blocks = data.draw(st.sets(st.sampled_from(chain)))
            state.event(key_of(replica(at)), BlockStored(sorted(blocks)), 0.0)
            cached[at] |= blocks
        asked = request(Prompt(6 * 16, tuple(chain)), Prompt(40, tuple(chain[:2])))
        slate = state.slates.of(MODEL, asked, 0.0)
        for row, one in enumerate(slate.replicas):
            if one is not None:
                own = cached[int(one.uid.removeprefix("u"))]
                depth = next((n for n, block in enumerate(chain) if block not in own), len(chain))
                assert slate.resident[row] == 16 * (min(depth, 5) + min(depth, 2))


def test_pools_tell_how_long_first_tokens_took_and_what_replicas_cache() -> None:
    state, one = FleetState(), replica(1)
    state.update(fleet(one))
    pool = next(it for it in pools_view(state, "g", 0.0).pools if it.id == one.pool)
    assert (pool.ttft_counts, pool.replicas[0].resident_blocks) == ([], 0)
    for ttft_s in (0.005, 0.01, 0.0101, 1e6, 0.0):
        state.event(key_of(one), RequestFinished("r", "stop", 1, 0, 1, ttft_s), 0.0)
    state.event(key_of(one), BlockStored([b"a", b"b"]), 0.0)
    pool = next(it for it in pools_view(state, "g", 0.0).pools if it.id == one.pool)
    assert (pool.ttft_counts[:3], sum(pool.ttft_counts), pool.ttft_counts[-1]) == ([2, 1, 0], 4, 1)
    assert pool.replicas[0].resident_blocks == 2


def test_two_gateways_of_one_fleet_see_all_of_its_arrivals() -> None:
    """Each books its own requests, and hears of the ends of the other's."""
    one, other = FleetState(), FleetState()
    for state in (one, other):
        state.update(fleet(replica(1)))
        state.slates.of(MODEL, request(), 0.0)
    key = key_of(replica(1))
    for at in range(40):
        mine, theirs = (one, other) if at % 2 else (other, one)
        asked = request(id=f"r{at}")
        mine.routed(MODEL, asked, key, 0, 0.0)
        booking = mine.book(asked, key, 0, 0.0)
        mine.bookings.release(booking, "answered")  # the event may come after the answer
        for state in (mine, theirs):
            state.event(key, RequestFinished(asked.id, "stop", 10, 0, 5), 0.0)
    alone = FleetState()
    alone.update(fleet(replica(1)))
    alone.slates.of(MODEL, request(), 0.0)
    for at in range(40):
        alone.book(request(id=f"r{at}"), key, 0, 0.0)
    rates = [state.slates.of(MODEL, request(), 1.0).rates.arrivals for state in (one, other, alone)]
    assert rates[0] == rates[1] == rates[2] > 5
