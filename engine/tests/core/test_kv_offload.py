"""Pages in the host's memory: what is copied there, what comes back, and what becomes of requests that wait for them."""

import numpy as np
import pytest
from fake_runner import FAILING_TOKEN, reference
from harness import Machine, make_config, make_request
from msgspec.structs import replace

from penstock.api.events import BlockStored
from penstock.engine.cache.layout import KVGroup
from penstock.engine.connectors.load_queue import LoadQueue
from penstock.engine.connectors.sightings import Sightings
from penstock.engine.core.measure.copies import CopyPace
from penstock.engine.core.scheduling.request import RequestStatus

BLOCK = 4
HYBRID = (KVGroup((0,), BLOCK, None), KVGroup((1,), BLOCK, 6))
PROMPT = list(range(1, 30))
MACHINES = [pytest.param((), id="full"), pytest.param(HYBRID, id="windows")]


def make(groups=(), *, host_pages: int = 200, num_blocks: int = 30, threshold: int = 0, stages: int = 1, **config) -> Machine:
    config = make_config(num_blocks=num_blocks, block_size=BLOCK, max_model_len=48, max_num_seqs=3, budget=64, **config)
    config = replace(config, cache=replace(config.cache, offload_threshold=threshold))
    config = replace(config, scheduler=replace(config.scheduler, pipeline_stages=stages))
    return Machine(config, groups, host_pages)


def flood(machine: Machine, first: int) -> None:
    """Other prompts, until nothing of those before is in the cache."""
    for index in range(first, first + 8):
        machine.add(make_request(index, [index] * 30, 4))
        machine.run()


def again(machine: Machine, index: int) -> None:
    """The prompt once more, up to where its pages are on their way."""
    machine.add(make_request(index, PROMPT, 6))
    machine.step()


def stats(machine: Machine):
    assert machine.scheduler._offload is not None
    return machine.scheduler._offload.stats()


@pytest.mark.req("KO-01", "KO-02", "KO-15")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", MACHINES)
def test_what_the_cache_has_lost_comes_back_from_the_hosts_memory(groups, depth):
    machine = make(groups, depth=depth)
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    flood(machine, 1)
    prefilled = machine.runner.prefilled
    again(machine, 50)
    plan = machine.plans[-1]
    assert plan.transfers is not None and len(plan.transfers.load_blocks) == (7 if not groups else 7 + 2)
    assert not len(plan.rows), "nobody else has anything to do: the plan has no rows"
    if depth == 2:
        assert machine.scheduler.waiting() == {"remote_kv": 1}
        assert machine.scheduler._book._live[50].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    machine.run()
    assert machine.streams[50] == machine.streams[0] == reference(PROMPT, 6)
    assert machine.cached_tokens[50] == 28 and machine.runner.prefilled - prefilled <= 1 + 6, "no token that came is computed"
    found = stats(machine)
    assert (
        found.loaded_tokens == 28
        and found.memory.loaded_bytes == len(plan.transfers.load_blocks)
        and found.memory.failed_pages == 0
    )
    machine.check_no_leak()


@pytest.mark.req("KO-05")
@pytest.mark.parametrize("groups", MACHINES)
def test_with_a_threshold_only_what_several_prompts_have_shown_is_copied(groups):
    """Of the window's group, only the blocks that the last tokens see are in the cache still."""
    machine = make(groups, threshold=2)
    machine.add(make_request(0, PROMPT, 9))
    machine.run()
    assert stats(machine).memory.pages_used == 0, "neither a prompt that came once, nor what was generated"
    machine.add(make_request(1, PROMPT, 9))
    machine.run()
    machine.add(make_request(2, [99] * 9, 2))  # a step that carries the copies
    machine.run()
    prompt = set(machine.scheduler._book._hasher.hash(PROMPT))
    copied = machine.scheduler._offload.tier.ready()
    assert {key.block_hash for key in copied} == prompt and {key.group for key in copied} == set(range(len(groups) or 1))
    flood(machine, 10)
    again(machine, 50)
    machine.run().check_no_leak()
    assert machine.cached_tokens[50] == 28 and machine.streams[50] == machine.streams[0][:6]


def test_the_blocks_that_were_shown_last_are_remembered():
    sightings = Sightings(2, most=2)
    for names in ([b"a", b"b"], [b"a"], [b"c"], [b"b"]):
        sightings.saw(names)
    assert [sightings.enough(name) for name in (b"a", b"b", b"c")] == [False, False, False], "a went for b, which came anew"
    sightings.saw([b"c"])
    assert sightings.enough(b"c")


def test_without_room_in_the_hosts_memory_everything_is_computed():
    machine = make(host_pages=3)
    for index in (0, 50):
        machine.add(make_request(index, PROMPT, 6))
        machine.run()
        flood(machine, index + 1)
    assert machine.cached_tokens[50] == 0 and machine.streams[50] == machine.streams[0]
    assert stats(machine).memory.evicted_pages > 0 and stats(machine).memory.pages_used == 3


def test_others_run_while_a_request_waits_for_its_pages():
    machine = make(depth=2)
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    flood(machine, 1)
    machine.add(make_request(60, [7, 7], 12))
    machine.step()
    again(machine, 50)
    plan = machine.plans[-1]
    assert machine.planned == [60] and plan.transfers is not None and len(plan.transfers.load_blocks) == 7
    machine.run().check_no_leak()
    assert machine.streams[50] == machine.streams[0] and machine.streams[60] == reference([7, 7], 12)


def beside_a_decode(depth: int, stages: int = 1) -> Machine:
    """A prompt whose seven pages come back two at a time, since copies beside those who decode take no longer."""
    machine = make(depth=depth, stages=stages)
    offload = machine.scheduler._offload
    assert offload is not None
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    flood(machine, 1)
    offload._loads = LoadQueue(250_000_000)  # a quarter of a second a page, at a gigabyte a second
    offload._pace = lambda prefill_tokens, decodes: CopyPace(1.0 if decodes else 0.0, 0.5)
    machine.add(make_request(60, [7, 7], 12))
    machine.step()
    again(machine, 50)
    return machine


@pytest.mark.parametrize(("depth", "stages"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_pages_come_some_in_each_step_where_others_decode(depth, stages):
    machine = beside_a_decode(depth, stages)
    while machine.scheduler.waiting():
        machine.step()
    parts = [plan.transfers.load_blocks for plan in machine.plans if plan.transfers is not None]
    loaded = [part for part in parts if len(part)]
    assert [len(part) for part in loaded] == [2, 2, 2, 1] and len({*np.concatenate(loaded).tolist()}) == 7
    machine.run()
    while machine.scheduler.has_work:  # what is still to be stored
        machine.step()
    machine.check_no_leak()
    assert machine.streams[50] == machine.streams[0] and machine.streams[60] == reference([7, 7], 12)
    assert machine.cached_tokens[50] == 28 and stats(machine).memory.failed_pages == 0


def test_the_rest_of_the_pages_comes_at_once_when_nobody_decodes_any_more():
    machine = beside_a_decode(1)
    machine.abort(60)
    machine.step()
    assert len(machine.plans[-1].transfers.load_blocks) == 5 and not len(machine.plans[-1].rows)
    machine.run().check_no_leak()
    assert machine.streams[50] == machine.streams[0]


@pytest.mark.req("KO-31")
@pytest.mark.parametrize("parts_in_flight", [1, 2])
def test_a_step_that_fails_amid_a_load_ends_it_when_the_steps_after_it_are_over(parts_in_flight):
    machine = beside_a_decode(depth=1 + parts_in_flight)
    pool = machine.scheduler.kv.pool
    if parts_in_flight == 2:
        machine.step()
    machine._results.popleft()
    machine._take(machine.scheduler.fail_step("the device coughed", "step_failed", machine.now))
    assert machine.scheduler.waiting() == ({"capacity": 1} if parts_in_flight == 1 else {"remote_kv": 1})
    assert pool.num_used == (0 if parts_in_flight == 1 else 7), "the step after it may still write there"
    machine.run()
    assert machine.streams[50] == machine.streams[0] and machine.cached_tokens[50] == 0
    assert stats(machine).memory.failed_pages == 7 and not machine.scheduler._offload.has_errands
    machine.check_no_leak()


@pytest.mark.req("KO-07", "KO-25")
@pytest.mark.parametrize("depth", [2, 3])
def test_an_abort_while_pages_come_leaves_their_blocks_alone_until_they_are_there(depth):
    machine = make(depth=depth)
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    flood(machine, 1)
    again(machine, 50)
    blocks = set(machine.plans[-1].transfers.load_blocks.tolist())
    machine.abort(50)
    pool = machine.scheduler.kv.pool
    assert all(pool.ref_counts[block] == 1 for block in blocks), "somebody may still write there"
    machine.run()
    while machine._results:
        machine.step()
    assert pool.num_used == 0 and stats(machine).loaded_tokens == 0
    again(machine, 51)
    machine.run()
    assert machine.streams[51] == machine.streams[0] and machine.cached_tokens[51] == 28
    machine.check_no_leak()


@pytest.mark.req("KO-31")
def test_a_step_that_fails_costs_the_computation_of_what_it_was_to_bring():
    machine = make(depth=2)
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    flood(machine, 1)
    again(machine, 50)
    machine._results.popleft()
    machine._take(machine.scheduler.fail_step("the device coughed", "step_failed", machine.now))
    assert machine.scheduler.waiting() == {"capacity": 1}, "the request is none of that step's"
    machine.run()
    assert machine.streams[50] == machine.streams[0] and machine.cached_tokens[50] == 0
    assert stats(machine).memory.failed_pages == 7 and stats(machine).loaded_tokens == 0
    machine.check_no_leak()


def test_what_may_have_made_a_request_fail_comes_from_nowhere():
    machine = make()
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    flood(machine, 1)
    machine.add(make_request(50, [*PROMPT[:28], FAILING_TOKEN], 6))
    machine.run()
    assert machine.finished[50].error is not None
    machine.add(make_request(51, PROMPT, 6))
    machine.run()
    assert machine.cached_tokens[51] == 0 and machine.streams[51] == machine.streams[0]


def test_a_reset_forgets_the_hosts_memory_too():
    machine = make()
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    flood(machine, 1)
    assert stats(machine).memory.pages_used and machine.scheduler.kv.reset() and not stats(machine).memory.pages_used
    machine.add(make_request(50, PROMPT, 6))
    machine.run()
    assert machine.cached_tokens[50] == 0 and machine.streams[50] == machine.streams[0]


def test_an_adapter_under_an_old_name_finds_nothing_of_the_one_before():
    machine = make(loras=(1, 1))
    assert machine.load("a", "/first") is None
    machine.ask(0, PROMPT, 6, "a")
    machine.run()
    flood(machine, 1)
    assert machine.load("a", "/second", replace=True) is None
    machine.ask(50, PROMPT, 6, "a")
    machine.run()
    assert machine.cached_tokens[50] == 0 and machine.streams[50] == reference(PROMPT, 6, adapter="/second")


def test_an_adapter_under_an_old_name_finds_nothing_however_much_the_one_before_has_left():
    machine = make(num_blocks=14, loras=(1, 1))
    assert machine.load("a", "/first") is None
    for index in range(20):
        machine.ask(index, [index, *PROMPT], 2, "a")
        machine.run()
    assert machine.load("a", "/second", replace=True) is None
    for index in range(20):
        machine.ask(50 + index, [index, *PROMPT], 2, "a")
        machine.run()
        assert machine.cached_tokens[50 + index] == 0
        assert machine.streams[50 + index] == reference([index, *PROMPT], 2, adapter="/second")


def test_a_preempted_request_may_find_its_pages_again():
    machine = make(num_blocks=14, depth=2)
    machine.add(make_request(0, [1] * 8, 38), make_request(1, [2] * 8, 38))
    machine.run().check_no_leak()
    assert machine.scheduler.totals.num_preemptions and stats(machine).loaded_tokens > 0
    assert all(machine.streams[index] == reference([index + 1] * 8, 38) for index in range(2))


def test_prompts_whose_every_token_is_computed_load_nothing():
    machine = make()
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    flood(machine, 1)
    request = make_request(50, PROMPT, 6)
    machine.add(replace(request, sampling=replace(request.sampling, prompt_logprobs=1)))
    machine.run()
    assert machine.cached_tokens[50] == 0 and stats(machine).loaded_tokens == 0


@pytest.mark.req("KO-10")
def test_events_tell_the_tier_of_a_block_and_each_tier_for_itself():
    machine = make(host_pages=40)
    assert machine.scheduler.take_events() == [BlockStored([], "memory")], "what reads the stream knows that there is a tier"
    machine.live["memory"] = set()
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    prompt = machine.live_hashes.copy()
    machine.add(make_request(1, [1] * 8, 2))
    machine.run()
    assert machine.live["memory"] >= prompt, "stored with the next plan, and told when that has retired"
    for index in range(2, 5):
        machine.add(make_request(index, [index] * 30, 4))
        machine.run()
    gone = prompt - machine.live_hashes
    assert gone and gone & machine.live["memory"], "removed from the cache, and still in the host's memory"
    flood(machine, 10)
    assert not prompt & machine.live["memory"] and len(machine.live["memory"]) <= 40
    machine.check_no_leak()
    assert machine.scheduler.kv.pool.reset()
    machine._take_events()
    assert machine.live == {None: set(), "memory": set()}


def test_a_tier_of_pages_that_hold_several_hashes_tells_nothing():
    """A page is known by its last hash alone, and a prefix could not be followed."""
    large = (KVGroup((0,), 2 * BLOCK, None), KVGroup((1,), BLOCK, None))
    machine = make(large)
    machine.add(make_request(0, PROMPT, 6))
    machine.run()
    assert stats(machine).memory.pages_used > 0 and set(machine.live) == {None}
