"""The queues' order: shares by weight within a bound, bands in order without starvation, deadlines within a tenant."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.flow.band import Band
from penstock.gateway.flow.control import FlowControl, FlowLimits, Shed
from penstock.gateway.flow.queue import PATIENCE, ModelQueue
from penstock.gateway.flow.ticket import Ticket


def ticket(ordinal: int, tenant: str = "a", *, priority: int = 0, until: float = 1e9, size: int = 1, **more: float) -> Ticket:
    tokens, weight = int(more.get("tokens", 1)), more.get("weight", 1.0)
    return Ticket(
        model="m", tenant=tenant, priority=priority, weight=weight, tokens=tokens, size=size, until=until, ordinal=ordinal
    )


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 7.0}
COSTS = st.lists(st.integers(1, 500), min_size=5, max_size=40)


@given(st.fixed_dictionaries(dict.fromkeys(WEIGHTS, COSTS)), st.integers(0, 60))
@settings(max_examples=60)
def test_tenants_that_both_wait_are_served_within_one_request_of_each_other(costs: dict[str, list[int]], late: int) -> None:
    """Over any stretch in which both have something waiting; `c` joins only after `late` dispatches."""
    band, ordinal = Band(), 0

    def join(tenant: str) -> None:
        nonlocal ordinal
        for tokens in costs[tenant]:
            band.push(ticket(ordinal, tenant, tokens=tokens, weight=WEIGHTS[tenant]))
            ordinal += 1

    join("a"), join("b")
    served: Counter[str] = Counter()
    since: dict[tuple[str, str], tuple[float, float]] = {}
    for number in range(sum(map(len, costs.values()))):
        if number == late:
            join("c")
        if not band:
            break
        waiting = sorted(band.tenants())
        for one in waiting:
            for other in waiting:
                base = since.setdefault((one, other), (served[one] / WEIGHTS[one], served[other] / WEIGHTS[other]))
                gap = (served[one] / WEIGHTS[one] - base[0]) - (served[other] / WEIGHTS[other] - base[1])
                assert abs(gap) <= max(costs[one]) / WEIGHTS[one] + max(costs[other]) / WEIGHTS[other] + 1e-6
        gone = band.pop()
        served[gone.tenant] += gone.tokens
        since = {pair: base for pair, base in since.items() if set(pair) <= set(band.tenants())}


def test_idle_time_earns_nothing() -> None:
    band = Band()
    for number in range(50):
        band.push(ticket(number, "busy", tokens=10))
    for _ in range(30):
        band.pop()
    for number in range(50, 70):
        band.push(ticket(number, "late", tokens=10))
    assert Counter(band.pop().tenant for _ in range(20)) == {"busy": 10, "late": 10}


def test_outputs_that_become_known_are_charged() -> None:
    band = Band()
    for number in range(40):
        band.push(ticket(number, "long" if number % 2 else "short", tokens=10))
    band.pop(), band.pop()
    band.charge("long", 100.0)
    assert {band.pop().tenant for _ in range(10)} == {"short"}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("xy")), min_size=1, max_size=200))
@settings(max_examples=50)
def test_bands_go_in_order_and_none_waits_for_ever(arrivals: list[tuple[int, str]]) -> None:
    queue = ModelQueue()
    for ordinal, (priority, tenant) in enumerate(arrivals):
        queue.push(ticket(ordinal, tenant, priority=priority))
    bypassed: Counter[int] = Counter()
    in_order = 0
    while queue:
        bands = set(queue.bands)
        gone = queue.pop()
        if gone.priority != min(bands):
            assert bypassed[gone.priority] >= PATIENCE
            assert in_order >= PATIENCE
        in_order = in_order + 1 if gone.priority == min(bands) else 0
        for number in bands:
            bypassed[number] = 0 if number == gone.priority else bypassed[number] + 1
            assert bypassed[number] <= 4 * (PATIENCE + 1)


def test_many_bands_get_no_more_of_the_turns_than_one() -> None:
    """Somebody who asks for another priority with each request gains nothing by it."""
    queue = ModelQueue()
    for ordinal in range(500):
        queue.push(ticket(ordinal, "sly", priority=1 + ordinal))
    for ordinal in range(500, 1000):
        queue.push(ticket(ordinal, "plain"))
    turns = 10 * (PATIENCE + 1)
    assert Counter(queue.pop().tenant for _ in range(turns)) == {"plain": 10 * PATIENCE, "sly": 10}


def test_a_less_important_band_gets_its_turn_under_endless_pressure() -> None:
    queue = ModelQueue()
    queue.push(ticket(0, priority=5))
    for ordinal in range(1, PATIENCE + 1):
        queue.push(ticket(ordinal))
        assert queue.pop().priority == 0
    queue.push(ticket(99))
    assert queue.pop().priority == 5


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_within_a_tenant_the_earliest_deadline_goes_first_then_who_came_first(deadlines: list[int]) -> None:
    band = Band()
    for ordinal, until in enumerate(deadlines):
        band.push(ticket(ordinal, until=float(until)))
    order = [band.pop().key for _ in deadlines]
    assert order == sorted(order)


@given(st.data())
@settings(max_examples=80)
def test_bounds_hold_and_nothing_is_lost(data: st.DataObject) -> None:
    """Random arrivals, departures and dispatches beside a plain set."""
    limits = FlowLimits(requests=12, bytes=60, tenant_requests=6, tenant_bytes=40)
    control, alive, ordinal = FlowControl(limits), set[Ticket](), 0
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["offer", "offer", "offer", "leave", "take"])):
            case "offer":
                ordinal += 1
                new = ticket(
                    ordinal,
                    data.draw(st.sampled_from("abcd")),
                    priority=data.draw(st.integers(0, 2)),
                    size=data.draw(st.integers(1, 20)),
                )
                ahead = [other for other in alive if other.priority <= new.priority]
                try:
                    displaced = control.offer(new)
                except Shed as shed:
                    if shed.reason == "queue_full":
                        assert len(ahead) >= 12 or sum(other.size for other in ahead) + new.size > 60
                else:
                    assert all(victim.priority >= new.priority for victim in displaced)
                    alive = (alive - set(displaced)) | {new}
            case "leave" if alive:
                gone = data.draw(st.sampled_from(sorted(alive, key=lambda t: t.ordinal)))
                control.leave(gone)
                alive.remove(gone)
            case "take":
                taken = control.take("m")
                assert (taken is None) == (not alive)
                alive.discard(taken)  # type: ignore[arg-type]
        assert {waiting for queue in control.queues.values() for waiting in queue} == alive
        assert control.requests == len(alive) <= 12
        assert control.bytes == sum(waiting.size for waiting in alive) <= 60
        for tenant in "abcd":
            assert control.requests_of(tenant) == sum(waiting.tenant == tenant for waiting in alive) <= 6
        assert sum(band.tokens for queue in control.queues.values() for band in queue.bands.values()) == len(alive)


def test_the_last_of_the_least_important_goes_for_a_more_important_one() -> None:
    control = FlowControl(FlowLimits(requests=4))
    low = [ticket(n, priority=9) for n in range(2)]
    high = [ticket(n, priority=1) for n in range(2, 4)]
    for one in (*low, *high):
        control.offer(one)
    assert control.offer(ticket(4, priority=0)) == [low[1]]
    assert control.offer(ticket(5, priority=1)) == [low[0]]
    with pytest.raises(Shed, match="queue_full"):
        control.offer(ticket(6, priority=1))


def test_within_a_band_who_has_more_waiting_makes_room_for_who_has_less() -> None:
    control = FlowControl(FlowLimits(requests=6))
    flood = [ticket(n, "flood") for n in range(6)]
    for one in flood:
        control.offer(one)
    assert control.offer(ticket(6, "small")) == [flood[5]]
    with pytest.raises(Shed, match="queue_full"):
        control.offer(ticket(7, "flood"))
    control.offer(ticket(8, "small"))
    control.offer(ticket(9, "small"))
    with pytest.raises(Shed, match="queue_full"):  # three each
        control.offer(ticket(10, "small"))


def test_nobody_makes_room_for_one_who_would_then_have_as_much() -> None:
    control = FlowControl(FlowLimits(requests=3))
    for number, tenant in enumerate("abc"):
        control.offer(ticket(number, tenant))
    with pytest.raises(Shed, match="queue_full"):
        control.offer(ticket(3, "d"))
    heavy = FlowControl(FlowLimits(requests=4))
    flood = [ticket(number, "heavy", weight=3.0) for number in range(4)]
    for one in flood:
        heavy.offer(one)
    assert heavy.offer(ticket(4, "light", weight=1.0)) == [flood[3]], "(4 - 1) / 3 is as much as 1"
    with pytest.raises(Shed, match="queue_full"):
        heavy.offer(ticket(5, "light", weight=1.0))


def test_what_goes_before_a_newcomer_is_its_own_band_and_the_more_important() -> None:
    queue = ModelQueue()
    for number, (priority, tokens) in enumerate([(0, 10), (5, 200), (5, 30), (9, 4000)]):
        queue.push(ticket(number, priority=priority, tokens=tokens))
    assert [queue.tokens_before(priority) for priority in (-1, 0, 3, 5, 8, 9)] == [0, 10, 10, 240, 240, 4240]


def test_a_tenant_has_a_bound_of_its_own() -> None:
    control = FlowControl(FlowLimits(tenant_requests=2, tenant_bytes=10))
    control.offer(ticket(0, size=4))
    with pytest.raises(Shed, match="tenant_queue_full"):
        control.offer(ticket(1, size=7))
    control.offer(ticket(2, size=6))
    with pytest.raises(Shed, match="tenant_queue_full"):
        control.offer(ticket(3, size=0))
    with pytest.raises(Shed, match="tenant_queue_full"):
        control.offer(ticket(4, "b"), tenant_requests=0)
    control.offer(ticket(5, "c"), tenant_requests=1)
