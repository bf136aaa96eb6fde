"""Loading or computing: what is learned of loads, and what follows from it for requests."""

import random
from collections.abc import Callable

import pytest
from fake_runner import reference
from harness import Machine, make_request
from test_kv_offload import PROMPT, again, flood, make

from penstock.engine.connectors.load_costs import FORGET_S, LoadCosts, TierLoads
from penstock.engine.connectors.load_queue import Load, LoadQueue
from penstock.engine.connectors.lower_tier import LowerTier
from penstock.engine.connectors.moves import Moved, PageFile
from penstock.engine.connectors.tier_index import Key
from penstock.engine.core.measure.copies import CopyPace
from penstock.engine.core.measure.load import LoadMeter
from penstock.engine.core.measure.prompt_cost import PromptCost, chunk_pairs
from penstock.engine.core.scheduling.request import Request


def at(tokens_per_s: float) -> Callable[[int, int, int], float]:
    """Prompts are computed as fast as that, whatever is before or behind."""
    return lambda start, tokens, rest: tokens / tokens_per_s


def learned(fixed: float, each: float, sizes: list[int]) -> TierLoads:
    loads, noise = TierLoads(), random.Random(1)
    for at, pages in enumerate(sizes):
        loads.observe(pages, (fixed + each * pages) * noise.uniform(0.95, 1.05), float(at))
    return loads


@pytest.mark.parametrize(("fixed", "each"), [(0.02, 0.001), (0.0, 0.004), (0.05, 0.0)])
def test_the_fixed_part_of_a_load_is_told_from_that_of_each_page(fixed: float, each: float) -> None:
    loads = learned(fixed, each, [1, 3, 40, 200, 7, 90, 15, 120] * 5)
    for pages in (1, 10, 100, 300):
        assert loads.seconds(pages, 40.0) == pytest.approx(fixed + each * pages, rel=0.1, abs=0.004)


def test_the_break_even_is_where_both_take_the_same_time() -> None:
    """n* = fixed / (time to compute a token - time to load one), within a tenth."""
    costs = LoadCosts(at(1000.0))
    costs.memory = learned(0.02, 0.004, [1, 3, 40, 20, 7] * 8)
    even = 0.02 / (1 / 1000 - 0.004 / 16)
    assert not costs.pays(0, int(even * 0.9), 1, round(even * 0.9 / 16), 40.0)
    assert costs.pays(0, int(even * 1.3), 1, round(even * 1.3 / 16), 40.0)


def prompts_of(meter: LoadMeter, steps: list[tuple[int, int]], seconds: Callable[[int, float], float]) -> None:
    """Takes in steps of prompts, by the tokens before those of the step and their number; `seconds` by tokens and pairs."""
    for start, tokens in steps:
        pairs = chunk_pairs(start + tokens, tokens)
        meter.observe(0.0, seconds=seconds(tokens, pairs), prefill_tokens=tokens, sampled_tokens=0, prefill_pairs=pairs)


STEPS = [(0, 1024), (1024, 1024), (0, 300), (1024, 500), (300, 17), (2048, 1024)] * 5


def test_a_late_part_of_a_long_prompt_is_loaded_where_an_early_one_is_computed() -> None:
    """A load takes as long wherever in its prompt it is; computing takes longer, the more tokens are before."""
    meter = LoadMeter()
    costs = LoadCosts(meter.saved_s)
    costs.memory.observe(4, 0.02, 0.0)
    assert costs.pays(0, 64, 1, 4, 0.0), "how fast prompts are computed is unknown"
    prompts_of(meter, STEPS, lambda tokens, pairs: 2e-4 * tokens + 1e-7 * pairs)
    assert meter.saved_s(0, 64, 1) == pytest.approx(2e-4 * 64 + 1e-7 * 64 * 65 / 2)
    assert meter.saved_s(4096, 64, 1) == pytest.approx(2e-4 * 64 + 1e-7 * 64 * (4096 + 65 / 2))
    assert not costs.pays(0, 64, 1, 4, 0.0) and costs.pays(4096, 64, 1, 4, 0.0)


def test_the_first_tokens_of_a_step_cost_little_since_the_rest_takes_a_step_anyway() -> None:
    """A step takes 1 ms and 0.1 ms a token, but 3 ms at least."""
    meter = LoadMeter()
    prompts_of(meter, STEPS, lambda tokens, pairs: 1e-3 + 1e-4 * tokens)
    assert meter.saved_s(0, 16, 1) == pytest.approx(1.6e-3), "what the least step takes is unknown"
    meter.observe(0.0, seconds=3e-3, prefill_tokens=0, sampled_tokens=1)
    assert meter.saved_s(0, 16, 1) == pytest.approx(0.0) and meter.saved_s(0, 24, 1) == pytest.approx(0.5e-3)
    assert meter.saved_s(0, 1000, 1) == pytest.approx(98.1e-3)
    assert meter.saved_s(0, 16, 20) == pytest.approx(1.6e-3), "both are above the least"


@pytest.mark.parametrize(("step", "each", "pair"), [(0.0, 2e-4, 0.0), (0.0, 0.0, 1e-7), (0.02, 2e-4, 0.0), (0.02, 0.0, 1e-7)])
def test_prompts_of_one_length_or_of_one_kind_of_work_have_no_negative_cost(step: float, each: float, pair: float) -> None:
    alike, noisy, noise = PromptCost(), PromptCost(), random.Random(1)
    assert noisy.seconds(0, 1) is None
    for tokens in [200] * 5:
        alike.observe(tokens, chunk_pairs(tokens, tokens), 0.05)
    assert alike.seconds(0, 200) == pytest.approx(0.05) and alike.seconds(0, 100) == pytest.approx(0.025)
    for tokens in [64, 512, 1024, 128] * 10:
        pairs = chunk_pairs(tokens, tokens)
        noisy.observe(tokens, pairs, (step + each * tokens + pair * pairs) * noise.uniform(0.8, 1.2))
    for tokens in (1, 64, 1024):
        found = noisy.seconds(0, tokens)
        whole = step + each * tokens + pair * chunk_pairs(tokens, tokens)
        assert found is not None and found >= 0 and found == pytest.approx(whole, rel=0.15, abs=0.01)


def test_nothing_is_declined_as_long_as_a_time_is_unknown() -> None:
    speed = 0.0
    costs = LoadCosts(lambda start, tokens, rest: tokens / speed if speed else None)
    assert costs.pays(0, 16, 1, 1, 0.0)
    costs.memory.observe(1, 5.0, 0.0)
    assert costs.pays(0, 16, 1, 1, 1.0), "how fast prompts are computed is unknown"
    speed = 1e6
    assert not costs.pays(0, 16, 1, 1, 1.0) and costs.memory.declined_tokens == 16
    assert costs.pays(0, 16, 1, 1, 1.0, lower="disk"), "of the disk nothing is known"
    costs.lower["disk"].observe(1, 5.0, 1.0)
    assert not costs.pays(0, 16, 1, 1, 1.0, lower="disk") and costs.lower["disk"].declined_tokens == 16


def test_what_is_old_is_forgotten_so_that_a_tier_gets_another_chance() -> None:
    loads = TierLoads()
    loads.observe(4, 9.0, 0.0)
    loads.observe(8, 18.0, 1.0)
    assert loads.seconds(4, 1.0) == pytest.approx(9.0)
    assert loads.seconds(4, 1.0 + FORGET_S) is None and loads.seconds(4, 0.5) is None, "a clock that goes back tells no age"
    loads.observe(4, 0.1, 2.0 + FORGET_S)
    assert loads.seconds(4, 2.0 + FORGET_S) == pytest.approx(0.1)


def test_loads_of_one_size_leave_another_size_to_be_tried() -> None:
    loads = TierLoads()
    loads.observe(10, 1.0, 0.0)
    assert loads.seconds(1, 0.0) == pytest.approx(0.1), "as if all of it were each page's"
    assert loads.seconds(100, 0.0) == pytest.approx(1.0), "as if all of it were fixed"


def machine_with(costs: LoadCosts, depth: int = 1) -> Machine:
    machine = make(depth=depth)
    offload = machine.scheduler._offload
    assert offload is not None
    offload._costs = costs
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    flood(machine, 1)
    return machine


@pytest.mark.parametrize(("tokens_per_s", "loads"), [(1e9, False), (1e-9, True)])
def test_a_request_computes_what_a_load_would_bring_more_slowly(tokens_per_s: float, loads: bool) -> None:
    costs = LoadCosts(at(tokens_per_s))
    costs.memory.observe(7, 2.0, 0.0)
    machine = machine_with(costs)
    again(machine, 50)
    machine.run()
    assert machine.streams[50] == machine.streams[0] == reference(PROMPT, 6)
    assert machine.cached_tokens[50] == (28 if loads else 0)
    found = machine.scheduler._offload.stats()
    assert (found.memory.declined_tokens, found.loaded_tokens) == ((0, 28) if loads else (28, 0))
    assert found.queried_tokens >= 29, "a load that was declined was looked up like any other"
    machine.check_no_leak()


def test_a_load_is_timed_from_the_decision_until_its_pages_are_there() -> None:
    costs = LoadCosts(at(1.0))
    machine = machine_with(costs, depth=2)
    assert costs.memory.seconds(7, machine.now) is None
    again(machine, 50)
    machine.run()
    assert costs.memory.seconds(7, machine.now) == 1.0, "here each step takes a second"
    offload = machine.scheduler._offload
    assert offload is not None
    assert offload.tokens_per_s("memory", machine.now) == 28, "seven pages of four tokens in a second"
    assert offload.tokens_per_s("memory", machine.now + FORGET_S) == offload.tokens_per_s("disk", machine.now) == 0


def test_copies_of_a_step_fill_the_time_that_they_may_take_as_far_as_copies_have_been_timed() -> None:
    queue, pages = LoadQueue(1_000_000), 400
    keys = [Key(0, bytes([at // 256, at % 256])) for at in range(pages)]
    request = Request(make_request(0, PROMPT), 0.0)
    queue.add(Load(request, 0.0, 16 * pages, 16 * pages, keys, [*range(pages)], [*range(pages)]))
    [part] = queue.take(CopyPace(0.01, 0.5))
    assert len(part.blocks) == 5, "a gigabyte a second, until one has been timed"
    assert queue.retired([part], 0.0005) == []
    [part] = queue.take(CopyPace(0.01, 0.5))
    assert part.blocks == [*range(5, 55)], "ten gigabytes a second"
    queue.retired([part], 0.048)
    taken = [sum(len(part.blocks) for part in queue.take(CopyPace(0.01, 0.5))) for _ in range(10)]
    assert taken == [0] * 9 + [5], "they have taken as long as those of ten steps may"
    assert [len(part.blocks) for part in queue.take(CopyPace())] == [340] and not queue.is_due, "nobody waits"


def test_copies_that_may_take_little_of_many_steps_go_with_few_of_them() -> None:
    queue = LoadQueue(1_000_000)
    request = Request(make_request(0, PROMPT), 0.0)
    queue.add(Load(request, 0.0, 1600, 1600, [Key(0, bytes([at])) for at in range(100)], [*range(100)], [*range(100)]))
    taken = [sum(len(part.blocks) for part in queue.take(CopyPace(0.01, 0.05))) for _ in range(100)]
    assert {*taken} == {0, 2} and all(taken[at] == 2 for at in (0, 4, 8, 12)), "a quarter of a step in one of five at most"
    assert sum(taken) * 0.001 == pytest.approx(0.05 * 100 * 0.01, abs=0.003)


def test_a_page_that_takes_long_has_steps_without_copies_after_it() -> None:
    queue = LoadQueue(20_000_000)
    request = Request(make_request(0, PROMPT), 0.0)
    queue.add(Load(request, 0.0, 160, 160, [Key(0, bytes([at])) for at in range(10)], [*range(10)], [*range(10)]))
    taken = [len(queue.take(CopyPace(0.01, 0.5))) for _ in range(9)]
    assert taken == [1, 0, 0, 0, 1, 0, 0, 0, 1], "two steps' time each, of which copies may take half"


def load_of(pages: int) -> Load:
    request = Request(make_request(0, PROMPT), 0.0)
    return Load(request, 0.0, pages, pages, [Key(0, bytes([at])) for at in range(pages)], [*range(pages)], [*range(pages)])


def test_steps_without_anything_to_copy_cost_the_load_that_comes_next_nothing() -> None:
    queue = LoadQueue(1_000_000)
    for _ in range(20):
        assert not queue.take(CopyPace(0.01, 0.05))
        queue.add(load_of(1))
        assert len(queue.take(CopyPace(0.01, 0.05))) == 1
        for _ in range(2):  # of a step's time, a twentieth for each: what one page takes
            assert not queue.take(CopyPace(0.01, 0.05))


def test_copies_that_take_a_bit_longer_than_expected_leave_no_step_without_any() -> None:
    queue = LoadQueue(1_000_000)
    queue.add(load_of(20))
    parts = queue.take(CopyPace(0.01, 0.5))
    queue.retired(parts, 0.006)
    assert [len(part.blocks) for part in [*parts, *queue.take(CopyPace(0.01, 0.5))]] == [5, 3], "two fifths, at 1.2 ms"


def test_copies_that_stood_still_with_their_machine_do_not_keep_the_next_ones_waiting_as_long() -> None:
    queue, steps = LoadQueue(100_000), 0
    queue.add(load_of(200))
    queue.retired(queue.take(CopyPace(0.01, 0.03)), 60.0)
    while queue.is_due:
        parts = queue.take(CopyPace(0.01, 0.03))
        queue.retired(parts, sum(0.0001 * len(part.blocks) for part in parts))
        steps += 1
    assert steps < 2000, "ten seconds a page at first: a page in a quarter of a step's time, and not one in 30,000 steps"


@pytest.mark.req("KO-33")
@pytest.mark.parametrize("slow", [False, True])
def test_the_disk_is_read_only_where_that_is_faster(slow: bool) -> None:
    costs = LoadCosts(at(10.0))
    costs.memory.observe(7, 0.1, 0.0)
    machine = machine_with(costs)
    offload = machine.scheduler._offload
    assert offload is not None
    disk = LowerTier("disk", offload.tier, 100, 1, costs.lower["disk"])
    offload.lower.append(disk)
    names = [name for name in offload.names() if Key(0, name) in offload.tier][:7]
    disk.open(PageFile(0, name) for name in names)
    offload.tier.clear()
    disk._wanted.clear()
    costs.memory.observe(7, 0.1, machine.now)
    costs.lower["disk"].observe(7, 9.0 if slow else 1.0, machine.now)
    machine.add(make_request(50, PROMPT, 6))
    machine.step()
    moves = disk.take(machine.now)
    assert [move.action for move in moves] == ([] if slow else ["read"] * 7)
    assert disk.stats().declined_tokens == (28 if slow else 0)
    if slow:
        machine.run()
        assert machine.streams[50] == reference(PROMPT, 6) and machine.cached_tokens[50] == 0
        return
    for move in moves:
        disk.moved(move.number, Moved(0.1), machine.now)
    offload.resume(machine.scheduler, machine.now + 3)
    assert costs.lower["disk"].seconds(7, machine.now + 3) == pytest.approx((0.9 + 3) / 1.9), "the wait for it was timed, too"
    machine.step()
    plan = machine.plans[-1]
    assert plan.transfers is not None and len(plan.transfers.load_blocks) == 7
