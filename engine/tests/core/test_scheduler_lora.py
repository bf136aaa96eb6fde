"""Adapters and their slots: who waits, who goes first, and what the cache may share."""

import random

import pytest
from fake_runner import reference
from harness import Machine, make_config, make_request

from penstock.engine.commands import LoadAdapter, UnloadAdapter
from penstock.engine.core.control.control_error import ControlError
from penstock.engine.core.scheduling.lora.adapter_table import PATIENCE_S, AdapterTable
from penstock.engine.core.scheduling.request import Request
from penstock.engine.messages import ADAPTER_FAILED, ADAPTER_GONE, AdapterInfo
from penstock.prompt.hashing import BlockHasher, ExtraKeys


def machine(slots: int = 2, host: int = 4, adapters: str = "abc", **config) -> Machine:
    made = Machine(make_config(loras=(slots, host), **config))
    for name in adapters:
        assert made.load(name) is None
    return made


def names(made: Machine) -> list[str | None]:
    return [adapter.info.name if adapter else None for adapter in made.scheduler.adapters.table.slots]


@pytest.mark.req("LO-06", "LO-09", "LO-26")
def test_one_batch_has_several_adapters_and_none_and_never_more_than_there_are_slots():
    made = machine(slots=2, budget=64)
    for index, adapter in enumerate("aabbc"):
        made.ask(index, [index + 1] * 6, 5, adapter)
    made.add(make_request(9, [7] * 6, 5))
    made.step()
    assert sorted(set(made.runner.adapters(made.plans[-1])), key=str) == ["/a", "/b", None]
    assert made.scheduler.waiting() == {"lora": 1} and names(made) == ["a", "b"]
    made.run().check_no_leak()
    for index, adapter in enumerate("aabbc"):
        assert made.streams[index] == reference([index + 1] * 6, 5, adapter=f"/{adapter}")
    assert made.streams[9] == reference([7] * 6, 5)


@pytest.mark.req("LO-18", "SCH-10", "LO-20")
def test_whoever_waits_for_a_slot_blocks_nobody_and_does_not_count_as_short_of_room():
    made = machine(slots=1, adapters="ab")
    made.ask(0, [1] * 4, 12, "a")
    made.ask(1, [2] * 4, 3, "b")
    made.ask(2, [3] * 4, 3, "a")
    made.add(make_request(3, [4] * 4, 3))
    made.step()
    assert made.scheduler.waiting() == {"lora": 1} and made.scheduler.num_running == 3
    table = made.scheduler.adapters.table
    assert (table.running(), table.waiting()) == ({"a": 2}, {"b": 1})
    made.run().check_no_leak()
    assert made.streams[1] == reference([2] * 4, 3, adapter="/b")


@pytest.mark.req("OB-26", "LO-20")
def test_whoever_has_an_adapter_and_no_room_waits_for_room():
    """The adapter is read while the batch fills: from then on another replica would help, and the autoscaler is to know."""
    made = machine(slots=1, host=1, adapters="ab", max_num_seqs=2)
    made.runner.slow_reads = True
    made.ask(0, [1] * 4, 2, "a")
    made.ask(1, [2] * 4, 2, "a")
    made.step()
    assert made.scheduler.waiting() == {"lora": 2}
    made.add(*[make_request(index, [index] * 4, 20) for index in (2, 3)])
    made.step()
    assert made.scheduler.waiting() == {"lora": 2} and made.scheduler.num_running == 2
    made.runner.finish_reads()
    made.step()
    read_at = made.now
    made.step()
    assert made.scheduler.waiting() == {"capacity": 2}
    made.run().check_no_leak()
    waits = {reason: buckets.total for reason, buckets in made.scheduler.totals.waits.buckets().items()}
    assert 0 < waits["lora"] <= 2 * read_at < waits["capacity"]


def test_a_long_queue_for_a_slot_is_looked_at_when_slots_change_and_not_at_every_step(monkeypatch):
    made = machine(slots=1, adapters="ab")
    made.ask(0, [1] * 4, 30, "a")
    for index in range(1, 51):
        made.ask(index, [2] * 4, 1, "b")
    table, asked = made.scheduler.adapters.table, []
    refuses = table.refuses
    monkeypatch.setattr(table, "refuses", lambda *of: asked.append(of) or refuses(*of))
    for _ in range(20):
        made.step()
    assert made.scheduler.waiting() == {"lora": 50} and len(asked) <= 51
    made.run().check_no_leak()


@pytest.mark.req("LO-18")
def test_a_steady_stream_for_one_adapter_starves_no_other():
    """Time passes a second a step, more than an adapter's patience: its turn comes when those that run now have ended."""
    assert PATIENCE_S < 1
    made = machine(slots=1, adapters="ab", max_num_seqs=4)
    made.ask(0, [9] * 4, 4, "b")
    made.step()
    made.ask(1, [1] * 4, 4, "a")
    for index in range(2, 40):
        made.ask(index, [index] * 4, 4, "b")
        made.step()
    assert made.lifecycle[1][-1][1] <= 10, "it ran within ten steps although others for the slot's holder kept coming"
    made.run().check_no_leak()
    # And a slot changes hands for many requests, not for each.
    assert made.scheduler.adapters.table.num_loads <= 4


@pytest.mark.req("LO-18")
def test_a_turn_ends_for_an_adapter_that_has_waited_half_a_second_and_not_before():
    """By a clock as engines have it: seconds since 1970."""
    began = 1.7e9
    table = AdapterTable(max_loras=1, max_cpu_loras=2)
    table.add(AdapterInfo(1, "a", "/a", None))
    table.add(AdapterInfo(2, "b", "/b", None))
    for copy, _ in table.take_reads():
        table.read(copy, ok=True)
    here, there = table.get(1), table.get(2)
    assert here is not None and there is not None
    table.joined(here)
    table.move_in(here, began)
    newcomer = Request(make_request(5, [1] * 4), 0)
    assert table.refuses(there, newcomer, began) and not table.refuses(here, newcomer, began)
    table.begin(began + PATIENCE_S - 0.01)
    assert not table.refuses(here, newcomer, began)
    table.begin(began + PATIENCE_S)
    assert table.refuses(here, newcomer, began)


@pytest.mark.req("LO-18")
def test_many_adapters_take_turns():
    made = machine(slots=2, host=3, adapters="abcdefgh", max_num_seqs=6)
    picks = random.Random(3)
    for index in range(120):
        made.ask(index, [index % 50] * 5, picks.randint(1, 9), picks.choice("abcdefgh"), tenant=picks.choice("xy"))
        if index % 3 == 0:
            made.step()
    made.run().check_no_leak()
    assert len(made.finished) == 120 and all(finished.error is None for finished in made.finished.values())


@pytest.mark.req("LO-18")
def test_the_more_urgent_does_not_yield():
    made = machine(slots=1, adapters="ab", policy="priority", max_num_seqs=2)
    made.ask(0, [1] * 4, 6, "a")
    made.step()
    made.ask(1, [2] * 4, 2, "b", priority=5)
    made.step()
    made.step()
    made.ask(2, [3] * 4, 2, "a", priority=0)
    made.step()
    assert {r.index for r in made.scheduler._tenancy.running} == {0, 2}
    made.run().check_no_leak()


@pytest.mark.req("LO-18")
def test_a_preempted_request_goes_on_though_its_adapter_yields():
    """Only requests that have not started wait for the adapter's next turn: one that has would hold up its client in the middle
    of an answer."""
    made = machine(slots=1, adapters="ab", num_blocks=13, max_model_len=48, budget=64, caching=False)
    for index, tokens in enumerate((30, 10, 12)):
        made.ask(index, [index] * 12, tokens, "a")
    made.step()
    made.ask(8, [8] * 4, 2, "b")
    while not made.scheduler.totals.num_preemptions:
        made.step()
    (preempted,) = {0, 1, 2} - {request.index for request in made.scheduler._tenancy.running}
    made.ask(9, [9] * 4, 2, "a")
    running = set()
    while preempted not in running:
        made.step()
        running = {request.index for request in made.scheduler._tenancy.running}
        assert 0 in running, "the adapter's turn has ended"
        assert made.scheduler.adapters.table._yielding and 9 not in running
    made.run().check_no_leak()
    assert list(made.cached_tokens)[-2:] == [8, 9], "the other adapter has had its turn before newer requests"


@pytest.mark.req("LO-08", "LO-05")
def test_adapters_go_from_disk_to_host_to_slot_and_back():
    made = machine(slots=1, host=2, adapters="abc")
    assert made.runner.read == ["/a", "/b", "/c"]
    assert sorted(made.runner._host.values()) == ["/a", "/b", "/c"]  # the drop goes with the next plan
    made.ask(0, [1] * 4, 2, "b")
    made.run()
    assert sorted(made.runner._host.values()) == ["/b", "/c"] and names(made) == ["b"]
    made.ask(1, [1] * 4, 2, "a")
    made.step()
    assert made.scheduler.waiting() == {"lora": 1}
    made.run()
    assert made.runner.read == ["/a", "/b", "/c", "/a"] and names(made) == ["a"]
    assert len(made.runner._host) == 2
    assert made.streams[1] == reference([1] * 4, 2, adapter="/a")


def test_with_room_for_one_alone_all_still_get_their_turn():
    made = machine(slots=1, host=1, adapters="ab")
    for index in range(12):
        made.ask(index, [index] * 4, 3, "ab"[index % 2])
    made.run().check_no_leak()
    for index in range(12):
        assert made.streams[index] == reference([index] * 4, 3, adapter=f"/{'ab'[index % 2]}")


@pytest.mark.req("LO-07")
def test_idle_slots_go_to_the_next_by_last_use():
    made = machine(slots=2, host=4, adapters="abc")
    for index, adapter in enumerate("aba"):
        made.ask(index, [1], 1, adapter)
        made.run()
    made.ask(3, [1], 1, "c")
    made.run()
    assert names(made) == ["a", "c"]


@pytest.mark.req("LO-17", "PC-05", "PC-04")
def test_adapters_share_no_blocks_and_each_finds_its_own():
    made, prompt = machine(), list(range(1, 18))
    for index, adapter in enumerate([None, "a", "b", "a", None]):
        if adapter is None:
            made.add(make_request(index, prompt, 2))
        else:
            made.ask(index, prompt, 2, adapter)
        made.run()
    assert [made.cached_tokens[index] for index in range(5)] == [0, 0, 0, 16, 16]
    hasher = BlockHasher(4, "test")
    for keys in (ExtraKeys(), ExtraKeys(lora="a"), ExtraKeys(lora="b")):
        assert made.live_hashes.issuperset(hasher.hash(prompt[:16], keys)), "as the picker reckons"


@pytest.mark.req("LO-17", "LO-23")
def test_what_was_cached_under_a_name_is_gone_when_other_weights_take_it():
    made, prompt = machine(adapters="a"), list(range(1, 18))
    made.ask(0, prompt, 2, "a")
    made.run()
    made.ask(1, [*prompt, 5, 5], 12, "a")  # still runs, and fills blocks, when the name changes hands
    made.step()
    assert "unload it, or replace it" in (made.load("a", "/other") or "")
    assert made.load("a", "/other", replace=True) is None
    made._take_events()
    assert not made.live_hashes.intersection(BlockHasher(4, "test").hash(prompt, ExtraKeys(lora="a")))
    made.ask(2, prompt, 2, "a")
    made.run().check_no_leak()
    assert made.streams[1] == reference([*prompt, 5, 5], 12, adapter="/a")
    assert made.streams[2] == reference(prompt, 2, adapter="/other") and made.cached_tokens[2] == 0
    made.ask(3, [*prompt, 5, 5], 2, "a")
    made.run()
    assert made.cached_tokens[3] == 16 and made.streams[3] == reference([*prompt, 5, 5], 2, adapter="/other")


@pytest.mark.req("LO-17")
@pytest.mark.parametrize("changed", [False, True])
def test_what_was_cached_is_gone_when_an_adapter_is_read_again_with_other_weights(changed, caplog):
    made, prompt = machine(slots=1, host=1, adapters="a"), list(range(1, 18))
    made.ask(0, prompt, 2, "a")
    made.run()
    assert made.load("b") is None and made.runner.read == ["/a", "/b"]
    if changed:
        made.runner.contents["/a"] = b"others"
    made.ask(1, prompt, 2, "b")
    made.run()
    made.ask(2, prompt, 2, "a")
    made.run().check_no_leak()
    assert made.runner.read == ["/a", "/b", "/a"] and made.cached_tokens[2] == (0 if changed else 16)
    assert ("/a holds other weights" in caplog.text) == changed
    made.ask(3, prompt, 2, "a")
    made.run()
    assert made.cached_tokens[3] == 16


@pytest.mark.req("LO-23")
def test_who_asks_under_the_number_of_a_replaced_adapter_gets_what_has_its_name():
    """A frontend learns of the new one a moment later than it is there."""
    made = machine(slots=2, adapters="a")
    first = made.scheduler.adapters.find("a")
    for uri in ("/second", "/third"):
        made.control.load(LoadAdapter("a", uri, None, True), lambda error: None)
        while made.scheduler.adapters.find("a").uri != uri:
            made.control.pump()
    made.add(make_request(0, [1] * 4, 5, lora_id=first.lora_id))
    made.run().check_no_leak()
    assert made.streams[0] == reference([1] * 4, 5, adapter="/third")
    made.control.unload(UnloadAdapter("a"))
    made.add(make_request(1, [1] * 4, 5, lora_id=first.lora_id))
    assert made.finished[1].code == ADAPTER_GONE


@pytest.mark.req("LO-23")
def test_unloading_lets_requests_finish_and_takes_no_more():
    made = machine(slots=1, adapters="ab")
    made.ask(0, [1] * 4, 9, "a")
    made.ask(1, [2] * 4, 9, "a")
    made.step()
    info = made.scheduler.adapters.find("a")
    made.control.unload(UnloadAdapter("a"))
    assert made.scheduler.adapters.find("a") is None
    made.add(make_request(2, [3], 2, lora_id=info.lora_id))
    assert made.finished[2].code == ADAPTER_GONE
    made.run().check_no_leak()
    assert made.streams[0] == reference([1] * 4, 9, adapter="/a")
    assert names(made) == [None] and [info.name for info in made.scheduler.adapters.infos()] == ["b"]
    made.ask(3, [1], 1, "b")
    made.run()
    assert sorted(made.runner._host.values()) == ["/b"]
    with pytest.raises(ControlError):
        made.control.unload(UnloadAdapter("a"))


def test_loading_twice_is_loading_once_and_a_broken_adapter_disturbs_nothing():
    made = machine(adapters="a")
    assert made.load("a") is None and made.runner.read == ["/a"]
    made.runner.slow_reads = True
    assert made.load("x", "/broken") == "not yet"
    made.ask(0, [1] * 4, 6, "a")
    made.step()
    assert made.scheduler.num_running == 1
    second = []
    made.control.load(LoadAdapter("x", "/broken"), second.append)
    assert "is being loaded" in (made.load("x", "/another") or "")
    made.runner.finish_reads()
    made.step()
    assert second == ["/broken is broken"] and made.scheduler.adapters.find("x") is None
    assert "the model's" in (made.load("m") or "") and "empty" in (made.load("") or "")
    made.run().check_no_leak()
    assert "serves no adapters" in (Machine(make_config()).load("a") or "")


def test_while_a_file_is_read_others_run_and_the_loop_need_not_turn():
    made = machine(slots=1, host=1, adapters="ab")
    made.runner.slow_reads = True
    made.ask(0, [1] * 4, 3, "a")
    made.add(make_request(1, [2] * 4, 6))
    while made.scheduler.num_running or not made.plans:
        made.step()
    assert 1 in made.finished and 0 not in made.finished
    assert not made.scheduler.has_work and not made.scheduler.is_stuck and made.control.is_reading
    made.runner.finish_reads()
    made.run().check_no_leak()


def test_an_adapter_whose_files_have_gone_fails_its_own_requests():
    made = machine(slots=1, host=1, adapters="ab")
    made.runner.slow_reads = True
    made.ask(0, [1] * 4, 3, "a")
    made.ask(1, [1] * 4, 3, "b")
    while not made.runner._reading:
        made.step()
    made.runner._reading[0] = (made.runner._reading[0][0], "/broken")
    made.runner.finish_reads()
    made.runner.slow_reads = False
    made.run().check_no_leak()
    assert made.finished[0].code == ADAPTER_FAILED and made.finished[1].error is None


def test_after_all_rows_were_taken_the_slots_are_filled_anew():
    made = machine(slots=1, adapters="a")
    made.ask(0, [1] * 4, 8, "a")
    made.step()
    made.scheduler.preempt_all(made.now)
    made.runner._slots = [None]
    made.run().check_no_leak()
    assert made.streams[0] == reference([1] * 4, 8, adapter="/a")


@pytest.mark.req("LO-09", "LO-18", "LO-26")
@pytest.mark.parametrize("seed", range(12))
def test_a_random_life_leaves_no_trace_and_every_answer_is_right(seed):
    pick = random.Random(seed)
    slots = pick.randint(1, 3)
    host = slots + pick.randint(0, 2)
    made = machine(
        slots, host, "", num_blocks=pick.choice([17, 25, 60]), max_num_seqs=pick.randint(1, 6), depth=pick.randint(1, 3)
    )
    uris: dict[str, str] = {}
    expected: dict[int, list[int]] = {}
    for step in range(300):
        action = pick.random()
        name = pick.choice("abcde")
        if action < 0.06:
            uri = f"/{name}{step}"
            assert made.load(name, uri, replace=True) is None
            uris[name] = uri
        elif action < 0.09 and name in uris:
            made.control.unload(UnloadAdapter(name))
            del uris[name]
        elif action < 0.13 and made.scheduler._book._live:
            index = pick.choice(list(made.scheduler._book._live))
            made.abort(index)
            expected.pop(index, None)
        elif action < 0.5:
            prompt, count = [pick.randrange(3)] * pick.choice([1, 5, 12, 30]), pick.randint(1, 12)
            if name in uris:
                made.ask(step, prompt, count, name)
            else:
                made.add(make_request(step, prompt, count))
            expected[step] = reference(prompt, count, adapter=uris.get(name))
        made.step()
    made.run().check_no_leak()
    assert {index: made.streams[index] for index in expected} == expected
