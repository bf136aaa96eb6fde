"""Demand over pools of different price, the budget and the ratio."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.operator.autoscale.allocation import Member, Offer, afford, allocate, balance, units

offers = st.lists(
    st.builds(
        lambda unit, cost, least, more: (unit, cost, least, least + more),
        st.floats(0.1, 4),
        st.floats(1, 100),
        st.integers(0, 3),
        st.integers(0, 8),
    ),
    min_size=1,
    max_size=4,
).map(lambda rows: [Offer(str(i), *row) for i, row in enumerate(rows)])


@given(offers, st.floats(0, 40), st.floats(0, 10))
def test_more_demand_never_gives_any_pool_less_and_bounds_hold(pools: list[Offer], demand: float, more: float) -> None:
    before, after = allocate(demand, pools), allocate(demand + more, pools)
    for pool in pools:
        assert pool.least <= before[pool.name] <= after[pool.name] <= pool.most
    carried = sum(after[pool.name] * pool.unit for pool in pools)
    assert carried >= demand + more - 1e-6 or all(after[pool.name] == pool.most for pool in pools)


def test_the_cheapest_for_what_it_carries_is_filled_first() -> None:
    strong = Offer("strong", unit=2.0, cost=15, least=0, most=4)
    weak = Offer("weak", unit=1.0, cost=8, least=0, most=4)
    assert allocate(6.5, [weak, strong]) == {"strong": 4, "weak": 0}
    assert allocate(8.5, [weak, strong]) == {"strong": 4, "weak": 1}


def member(name: str, group: str, wanted: int, current: int = 0, cost: float = 1, least: int = 0, most: int = 100) -> Member:
    return Member(name, group, Offer(name, 1.0, cost, least, most), wanted, current)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 99))
def test_the_budget_holds_and_takes_nothing_that_exists_before_what_does_not(
    rows: list[tuple[int, int, int]], budget: int
) -> None:
    members = [member(str(i), "g", wanted, current, cost) for i, (wanted, current, cost) in enumerate(rows)]
    sizes = afford(members, budget)
    assert sum(sizes[it.name] * it.offer.cost for it in members) <= budget
    if any(sizes[it.name] < min(it.current, it.wanted) for it in members):
        assert all(sizes[it.name] <= it.current for it in members)


def test_a_budget_that_does_not_suffice_keeps_prefill_and_decode_in_proportion() -> None:
    sizes = afford([member("pre", "Prefill", 4), member("dec", "Decode", 8)], 6)
    assert sizes == {"pre": 2, "dec": 4}


def test_minima_stand_above_the_budget() -> None:
    assert afford([member("a", "g", 5, least=3)], 1) == {"a": 3}


@given(st.integers(0, 20), st.integers(0, 20), st.floats(0.1, 1), st.floats(1, 5))
def test_the_ratio_only_adds_and_is_met_where_limits_allow(prefill: int, decode: int, low: float, high: float) -> None:
    pre, dec = member("pre", "Prefill", prefill, most=1000), member("dec", "Decode", decode, most=1000)
    sizes = balance([pre], [dec], (low, high))
    assert sizes["pre"] >= prefill and sizes["dec"] >= decode
    if prefill and decode:
        assert low - 1e-6 <= sizes["pre"] / sizes["dec"] <= high + 1e-6
    tight = replace(pre, offer=replace(pre.offer, most=prefill))
    assert balance([tight], [dec], (low, high))["pre"] == prefill


def test_a_pool_of_which_nothing_is_known_carries_what_the_others_do() -> None:
    assert units({"a": 100.0, "b": 50.0, "c": 0.0}) == {"a": 1.0, "b": 0.5, "c": 0.75}
    assert units({"a": 0.0}) == {"a": 1.0}
