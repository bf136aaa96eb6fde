"""Pinned prefixes: eviction spares them, and nothing is left of them afterwards."""

import pytest
from harness import Machine, make_config, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.cache.layout import KVGroup
from penstock.prompt.hashing import ExtraKeys

PROMPT = list(range(1, 14))
WINDOWS = (KVGroup((0,), 4, None), KVGroup((1,), 4, 9))


def flood(machine: Machine, first: int) -> None:
    """Other prompts, until nothing that can be evicted is left."""
    for index in range(first, first + 12):
        machine.add(make_request(index, [20 + index] * 20, 2))
        machine.run()


@pytest.mark.parametrize("groups", [(), WINDOWS], ids=["full", "windows"])
def test_a_pinned_prefix_is_found_after_a_flood_until_it_is_unpinned(groups):
    machine = Machine(make_config(num_blocks=40, max_model_len=64, max_num_seqs=2), groups)
    scheduler = machine.scheduler
    machine.add(make_request(0, PROMPT, 3))
    machine.run()
    assert scheduler.pin_prefix("system", PROMPT, ExtraKeys()) == 12
    assert scheduler.kv.usage > 0
    flood(machine, 1)
    machine.add(make_request(50, PROMPT, 3))
    machine.run()
    assert machine.cached_tokens[50] == 12 and machine.streams[50] == machine.streams[0]
    assert not scheduler.kv.reset(), "a pin holds its blocks"
    scheduler.kv.unpin_prefix("system")
    flood(machine, 60)
    machine.add(make_request(99, PROMPT, 3))
    machine.run()
    assert machine.cached_tokens[99] == 0
    machine.check_no_leak()


def test_what_cannot_be_pinned_is_refused_and_changes_nothing():
    machine = Machine(make_config(num_blocks=20, max_model_len=64))
    pin = machine.scheduler.pin_prefix
    with pytest.raises(ValueError, match="no block of this prefix is cached"):
        pin("a", PROMPT, ExtraKeys())
    machine.add(make_request(0, PROMPT, 3), make_request(1, [30] * 13, 3))
    machine.run()
    with pytest.raises(ValueError, match="no block"):
        pin("a", PROMPT, ExtraKeys(cache_salt="another's"))
    assert pin("a", PROMPT, ExtraKeys()) == 12
    with pytest.raises(ValueError, match="there is a pin 'a' already"):
        pin("a", PROMPT, ExtraKeys())
    assert pin("the same blocks cost nothing", PROMPT[:12], ExtraKeys()) == 12
    with pytest.raises(ValueError, match="of 19 blocks 6 would be pinned, and a sequence of full length needs 16 others"):
        pin("b", [30] * 13, ExtraKeys())
    with pytest.raises(ValueError, match="there is no pin 'b'"):
        machine.scheduler.kv.unpin_prefix("b")
    assert machine.scheduler.kv.num_pinned_blocks == 3
    machine.add(make_request(2, [40] * 50, 14))
    machine.run()
    assert len(machine.streams[2]) == 14, "a sequence of full length still fits"
    machine.scheduler.kv.unpin_prefixes()
    machine.check_no_leak()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["ask", "pin", "unpin"]), st.integers(0, 4)), max_size=30), st.booleans())
def test_pins_and_requests_in_any_order_leave_nothing_behind(steps, windows):
    machine = Machine(make_config(num_blocks=48, max_num_seqs=3), WINDOWS if windows else ())
    kv, pinned = machine.scheduler.kv, set[int]()
    for number, (what, which) in enumerate(steps):
        prompt = [which + 1] * (5 + 3 * which)
        if what == "ask":
            machine.add(make_request(number, prompt, 4))
            machine.step()
        elif what == "pin" and which not in pinned:
            try:
                machine.scheduler.pin_prefix(str(which), prompt, ExtraKeys())
                pinned.add(which)
            except ValueError as error:
                assert "cached" in str(error) or "pinned" in str(error)
        elif what == "unpin" and which in pinned:
            kv.unpin_prefix(str(which))
            pinned.remove(which)
    machine.run()
    assert kv.pool.num_used == kv.num_pinned_blocks
    kv.unpin_prefixes()
    machine.check_no_leak()
