"""Tenants that all have something waiting are served alike, whatever they ask for; and nobody waits for fairness' sake alone."""

import pytest
from fake_runner import reference
from harness import Machine, make_config, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.core.scheduling import token_counters
from penstock.engine.core.scheduling.token_counters import OUTPUT_COST, TokenCounters


def served(machine: Machine, weights: dict[str, float] | None = None) -> dict[str, float]:
    """By tenant, what the streams show of the service that it has had: prompts that ran, and tokens, over its weight."""
    totals: dict[str, float] = {}
    for index, (tenant, prompt) in machine.asked.items():
        if index in machine.cached_tokens:
            cost = len(prompt) - machine.cached_tokens[index] + OUTPUT_COST * len(machine.streams.get(index, []))
            totals[tenant] = totals.get(tenant, 0.0) + cost / (weights or {}).get(tenant, 1.0)
    return totals


class Market(Machine):
    """A machine that remembers whose requests it had."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.asked: dict[int, tuple[str, list[int]]] = {}

    def ask(self, tenant: str, prompt: list[int], max_tokens: int) -> None:
        index = len(self.asked)
        self.asked[index] = (tenant, prompt)
        self.add(make_request(index, prompt, max_tokens, tenant=tenant))


def jain(shares: list[float]) -> float:
    """1 where all have the same; 1/n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@pytest.mark.req("LIM-04", "SCH-33")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_noisy_tenant_and_a_quiet_one_have_the_same_while_both_wait(depth):
    market = Market(make_config(num_blocks=200, max_num_seqs=4, budget=16, depth=depth, caching=False))
    for _ in range(60):
        market.ask("noisy", [1] * 12, 10)
    for _ in range(10):
        market.ask("quiet", [2] * 12, 10)
        market.ask("other", [3] * 4, 14)
    while market.scheduler._book._waiting.tenants >= {"noisy", "quiet", "other"}:
        market.step()
    shares = served(market)
    assert jain(list(shares.values())) > 0.97, shares
    assert market.scheduler.num_running == 4, "no row is kept back"
    market.run().check_no_leak()
    for index, (_, prompt) in market.asked.items():
        assert market.streams[index] == reference(prompt, 14 if len(prompt) == 4 else 10)


@pytest.mark.req("LIM-04")
def test_first_come_first_served_is_not_fair():
    """What the counters are for: with one name for all, the same load leaves the quiet ones nothing."""
    market = Market(make_config(num_blocks=200, max_num_seqs=4, budget=16, caching=False))
    names = ["noisy"] * 60 + ["quiet", "other"] * 10
    for index, name in enumerate(names):
        market.asked[index] = (name, [1] * 12)
        market.add(make_request(index, [1] * 12, 10))
    for _ in range(60):
        market.step()
    shares = served(market)
    assert set(shares) == {"noisy"}


@pytest.mark.req("LIM-04")
def test_a_quiet_tenants_request_goes_next():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(*[make_request(index, [1], 4, tenant="noisy") for index in range(20)])
    for _ in range(9):
        machine.step()
    started = len(machine.cached_tokens)
    machine.add(make_request(99, [2], 4, tenant="quiet"))
    machine.run()
    assert list(machine.cached_tokens).index(99) <= started + 1
    of_noisy = [index for index in machine.cached_tokens if index != 99]
    assert of_noisy == sorted(of_noisy), "within a tenant the first come is served first: nobody starves"


def test_weights_share_in_proportion():
    weights = {"gold": 3.0}
    market = Market(make_config(num_blocks=400, max_num_seqs=4, budget=32, caching=False, weights=weights))
    for _ in range(80):
        market.ask("gold", [1] * 8, 8)
        market.ask("tin", [2] * 8, 8)
    for _ in range(120):
        market.step()
    plain = served(market)
    assert 2.4 < plain["gold"] / plain["tin"] < 3.6


def test_idleness_earns_no_credit():
    machine = Machine(make_config(max_num_seqs=1, num_blocks=200))
    machine.add(*[make_request(index, [1] * 8, 8, tenant="busy") for index in range(10)])
    for _ in range(50):
        machine.step()
    before = len(machine.cached_tokens)
    machine.add(*[make_request(100 + index, [2] * 8, 8, tenant="late") for index in range(10)])
    for _ in range(45):
        machine.step()
    since = list(machine.cached_tokens)[before:]
    assert 0 < sum(index < 100 for index in since) < len(since), "the late one does not have all until it has caught up"


arrivals = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.integers(1, 16), st.integers(0, 40)), min_size=20, max_size=60
)


@pytest.mark.slow
@pytest.mark.req("LIM-04")
@settings(max_examples=25)
@given(arrivals, st.integers(1, 4), st.sampled_from([{}, {"a": 2.0, "c": 0.5}]), st.integers(1, 2))
def test_the_difference_between_tenants_that_wait_is_bounded(wanted, max_num_seqs, weights, depth):
    """Theorem 4.4 of the paper: over any time in which two tenants both have requests waiting, their counters differ by at most
    what one admission can add, prompts and the outputs of a full batch."""
    market = Market(
        make_config(num_blocks=200, max_num_seqs=max_num_seqs, budget=16, depth=depth, caching=False, weights=weights)
    )
    bound = 2 * (20 + OUTPUT_COST * 16) * max_num_seqs / min([1.0, *weights.values()])
    counters = market.scheduler._book._counters
    for step in range(400):
        for tenant, length, max_tokens, arrives in wanted:
            if arrives == step:
                market.ask(tenant, [ord(tenant)] * length, max_tokens)
        market.step()
        waiting = [counters[tenant] for tenant in market.scheduler._book._waiting.tenants]
        if waiting:
            assert max(waiting) - min(waiting) <= bound
        if step > 40 and not market.scheduler.indexes():
            break
    market.run().check_no_leak()
    # Nothing is lost in the accounts: without lifts, counters would be exactly what was served.
    for tenant, share in served(market, weights).items():
        assert counters[tenant] >= share - 1e-6


def test_a_preemption_is_not_charged():
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=64, caching=False))
    machine.add(*[make_request(index, [index] * 12, 12, tenant="t") for index in range(3)])
    machine.run()
    assert machine.scheduler.totals.num_preemptions > 0
    assert machine.scheduler._book._counters["t"] == 3 * (12 + OUTPUT_COST * 12)


def test_tenants_are_forgotten_when_it_makes_no_difference(monkeypatch):
    monkeypatch.setattr(token_counters, "MAX_REMEMBERED", 3)
    counters = TokenCounters({})
    for name, service in [("a", 10), ("b", 30), ("c", 20), ("d", 5)]:
        counters.charge_prompt(name, service)
    assert counters.is_crowded
    counters.prune(waiting=["c"], live=["c", "a"])
    assert {name: counters[name] for name in "abcd"} == {"a": 10, "b": 30, "c": 20, "d": 0}
    slots = {counters.slot(name) for name in "abcd"}
    assert len(slots) == 4 and counters["d"] == 0, "a number is given again, and what it held is not"


def test_many_tenants_have_numbers_and_counters_of_their_own():
    counters = TokenCounters({"t3": 2.0})
    for number in range(50):
        counters.charge_prompt(f"t{number}", number)
    assert [counters[f"t{number}"] for number in range(50)] == [1.5 if number == 3 else number for number in range(50)]


def test_tenants_are_numbered_without_gaps():
    counters = TokenCounters({})
    assert [counters.slot(f"t{number}") for number in range(20)] == list(range(20))
