"""What is known of the fleet over time."""

import os
import time

import pytest

from penstock.api.events import BlockStored, RequestFinished
from penstock.api.fleet import Fleet, Model, Pool, Replica, Role
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.choice import choose
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import SUSPECT_S, FleetState

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


def request(*prompts: Prompt) -> RequestView:
    return RequestView(id="r", path="", model="m", prompts=prompts or (Prompt(10),))


def test_residency_is_of_full_blocks_and_never_the_last_token() -> None:
    state = FleetState()
    state.update(fleet(replica(1)))
    state.event(key_of(replica(1)), BlockStored([b"a", b"b"]), 0.0)
    (whole,), _ = state.candidates(MODEL, request(Prompt(32, (b"a", b"b"))), 0.0)
    assert whole.resident_tokens == 16
    (both,), _ = state.candidates(MODEL, request(Prompt(40, (b"a", b"b")), Prompt(20, (b"a",)), Prompt(20, (b"x",))), 0.0)
    assert both.resident_tokens == 32 + 16
    (other,), _ = state.candidates(MODEL, request(Prompt(32, (b"a", b"b"))), 0.0, comparable=())
    assert other.resident_tokens == 0


@pytest.mark.req("RT-14")
def test_prefill_replicas_get_no_whole_requests() -> None:
    state = FleetState()
    state.update(fleet(replica(1), replica(2, "ns/m/q"), role="Prefill"))
    candidates, _ = state.candidates(MODEL, request(), 0.0)
    assert [c.name for c in candidates] == ["r2"]


def test_a_replica_that_comes_back_under_its_uid_has_no_past() -> None:
    state = FleetState()
    key = key_of(replica(1))
    state.update(fleet(replica(1)))
    state.event(key, BlockStored([b"a"]), 0.0)
    state.reported(key, LoadReport(epoch=1, seq=1), 0.0)
    state.bookings.book("r", key, 5, 0.0)
    state.update(fleet())
    state.update(fleet(replica(1)))
    (candidate,), _ = state.candidates(MODEL, request(Prompt(16, (b"a",))), 0.0)
    assert (candidate.report, candidate.booked.requests, candidate.resident_tokens) == (None, 0, 0)
    assert state.bookings.released == {"replica_gone": 1}


def test_reports_of_any_carrier_and_order_leave_the_newest() -> None:
    state = FleetState()
    key = key_of(replica(1))
    state.update(fleet(replica(1)))
    for epoch, seq in ((1, 5), (1, 4), (2, 0), (1, 9)):
        state.reported(key, LoadReport(epoch=epoch, seq=seq), 1.0)
    heard = state.reports.get(key)
    assert heard is not None
    assert (heard.report.epoch, heard.report.seq) == (2, 0)


def test_what_strangers_say_is_ignored() -> None:
    state = FleetState()
    state.update(fleet())
    stranger = key_of(replica(9))
    for event in (BlockStored([b"a"]), RequestFinished("r", "stop", 1, 0, 1), LoadReport(epoch=1, seq=1)):
        state.event(stranger, event, 0.0)
    assert len(state.residency) == 0
    assert state.reports.get(stranger) is None


def test_suspicion_passes_with_time_and_with_a_word() -> None:
    state = FleetState()
    key = key_of(replica(1))
    state.update(fleet(replica(1)))

    def suspect(now: float) -> bool:
        (candidate,), _ = state.candidates(MODEL, request(), now)
        return candidate.suspect

    state.suspect(key, 10.0)
    assert suspect(10.1)
    assert not suspect(10.0 + SUSPECT_S)
    state.suspect(key, 20.0)
    state.reported(key, LoadReport(epoch=1, seq=1), 20.1)
    assert not suspect(20.2)


def test_pools_show_reports_holds_and_never_a_report_that_was_not_heard() -> None:
    state = FleetState()
    state.update(fleet(replica(1), replica(2, "ns/m/q")))
    state.reported(key_of(replica(1)), LoadReport(epoch=1, seq=1), 1.0)
    version = state.version
    state.hold_began(MODEL)
    view = state.pools("gw", 3.0)
    assert view.version == version + 1
    assert [(pool.id, pool.held) for pool in view.pools] == [("ns/m/p", 1), ("ns/m/q", 0)]
    first, second = view.pools[0].replicas[0], view.pools[1].replicas[0]
    assert first.report_age_s == 2.0
    assert (second.report, second.report_age_s) == (None, None)
    state.hold_ended(MODEL)
    assert [pool.held for pool in state.pools("gw", 3.0).pools] == [0, 0]


@pytest.mark.req("RT-42")
def test_a_pick_among_a_hundred_replicas_of_8k_tokens_takes_about_a_millisecond() -> None:
    state = FleetState()
    replicas = [replica(at) for at in range(100)]
    state.update(fleet(*replicas))
    hashes = [os.urandom(32) for _ in range(512)]
    for at, one in enumerate(replicas):
        state.event(key_of(one), BlockStored(hashes[: at * 5]), 0.0)
        state.reported(key_of(one), LoadReport(epoch=1, seq=1, num_requests_running=at % 9, max_num_seqs=64), 0.0)
    asked = request(Prompt(8192, tuple(hashes)))
    seconds: list[float] = []
    for _ in range(20):
        start = time.process_time()
        candidates, rejected = state.candidates(MODEL, asked, 0.5)
        choose(asked, candidates, rejected, "Cost", 0)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.003  # 1 ms on the reference machine
