"""The index of pages in the host's memory, against a model that remembers what each slot holds."""

import itertools
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.connectors.eviction import PolicyName
from penstock.engine.connectors.moves import PageFile, page_name, page_of
from penstock.engine.connectors.tier_index import Key, TierIndex

POLICIES = get_args(PolicyName)
VERBS = ["reserve", "reserve", "written", "written", "lost", "pin", "unpin", "forget", "touch", "clear"]


def key(number: int) -> Key:
    return Key(number % 2, bytes([number // 2]))


def stored(tier: TierIndex, *numbers: int) -> None:
    for number in numbers:
        slot = tier.reserve(key(number))
        assert slot is not None
        tier.written(key(number), slot, ok=True)


@pytest.mark.req("KO-08")
def test_the_least_recently_used_page_makes_room_and_a_pinned_one_never_does():
    tier = TierIndex(2)
    stored(tier, 1, 2)
    tier.touch([key(1)])
    slot = tier.slot(key(1))
    tier.pin([slot])
    stored(tier, 3)
    assert key(2) not in tier and key(1) in tier and tier.num_evicted == 1
    stored(tier, 4)
    assert key(3) not in tier and key(1) in tier
    tier.pin([tier.slot(key(4))])
    assert tier.reserve(key(5)) is None and key(1) in tier and key(4) in tier, "everything is being read"
    tier.unpin([slot])
    stored(tier, 5)
    assert key(1) not in tier


def hits(policy: PolicyName, size: int, asked: list[int]) -> int:
    """How often a page was there that a tier of that size was asked for; it is there afterwards."""
    tier, found = TierIndex(size, policy=policy), 0
    for number in asked:
        if (name := Key(0, number.to_bytes(4, "big"))) in tier:
            found += 1
            tier.touch([name])
        elif (slot := tier.reserve(name)) is not None:
            tier.written(name, slot, ok=True)
        assert tier.num_ready <= size
    return found


@pytest.mark.req("KO-09")
def test_a_scan_pushes_out_what_is_used_again_and_again_with_lru_and_not_with_arc():
    busy, new = list(range(8)), itertools.count(100)
    scanned = [number for _ in range(30) for number in (*busy, *busy, *itertools.islice(new, 40))]
    assert hits("lru", 20, scanned) == 30 * 8, "the second use of each round alone"
    assert hits("arc", 20, scanned) == 30 * 16 - 8, "all but the first use of each"
    # Pages that all come back after the same time, more of them than fit, help neither; what fits, both.
    assert hits("lru", 20, list(range(15)) * 9) == hits("arc", 20, list(range(15)) * 9) == 15 * 8


def test_arc_gives_more_room_to_the_kind_that_comes_back_too_late():
    """Pages that are used twice, the second time after fifteen others, behind pages that were used often; then a scan again."""
    often, twice = list(range(40)) * 5, [number for at in range(1000) for number in (1000 + at, 1000 + at - 15)]
    new = itertools.count(5000)
    scanned = [number for _ in range(50) for number in (*range(20), *range(20), *itertools.islice(new, 40))]
    assert hits("arc", 40, often) == 4 * 40 and hits("arc", 40, twice) > 960
    assert hits("arc", 40, [*often, *twice]) > 4 * 40 + 960, "room for what came once"
    assert hits("arc", 40, [*twice, *scanned]) > 960 + 50 * 40 - 30, "and back"


@pytest.mark.req("KO-06")
def test_a_page_is_found_when_it_is_written_and_not_before():
    tier = TierIndex(2)
    slot = tier.reserve(key(1))
    assert slot is not None and key(1) not in tier and tier.reserve(key(1)) is None
    tier.written(key(1), slot, ok=True)
    assert tier.slot(key(1)) == slot and tier.reserve(key(1)) is None
    lost = tier.reserve(key(2))
    assert lost is not None
    tier.written(key(2), lost, ok=False)
    assert key(2) not in tier and tier.reserve(key(3)) == lost


def test_what_is_forgotten_while_it_is_read_or_written_is_neither_found_nor_overwritten():
    tier = TierIndex(2)
    stored(tier, 1)
    slot = tier.slot(key(1))
    tier.pin([slot])
    writing = tier.reserve(key(2))
    assert writing is not None
    tier.clear()
    assert key(1) not in tier and tier.reserve(key(3)) is None, "no slot is free: one is read, one written"
    tier.unpin([slot])
    assert tier.reserve(key(3)) == slot
    tier.written(key(2), writing, ok=True)
    assert key(2) not in tier and tier.reserve(key(4)) == writing


@settings(max_examples=300)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 7)), max_size=60), st.sampled_from(POLICIES))
def test_in_any_order_a_slot_has_one_use_at_a_time(num_slots, steps, policy):
    tier, writing, read = TierIndex(num_slots, policy=policy), dict[int, int](), Counter[int]()
    holds: dict[int, int] = {}
    for verb, number in steps:
        if verb == "reserve" and number not in writing and (slot := tier.reserve(key(number))) is not None:
            assert not read[slot] and slot not in writing.values(), "a slot in use was handed out"
            writing[number] = slot
            holds.pop(slot, None)
        elif verb in ("written", "lost") and number in writing:
            slot = writing.pop(number)
            tier.written(key(number), slot, ok=verb == "written")
            holds[slot] = number
        elif verb == "pin" and key(number) in tier:
            read[tier.slot(key(number))] += 1
            tier.pin([tier.slot(key(number))])
        elif verb == "unpin" and (slots := sorted(read.elements())):
            slot = slots[number % len(slots)]
            read[slot] -= 1
            tier.unpin([slot])
        elif verb == "forget":
            tier.forget(key(number))
            assert key(number) not in tier
        elif verb == "touch":
            tier.touch([key(number)])
        elif verb == "clear":
            tier.clear()
        for number in range(8):
            if key(number) in tier:
                assert holds[tier.slot(key(number))] == number
    for number, slot in writing.items():
        tier.written(key(number), slot, ok=False)
    tier.unpin(list(read.elements()))
    tier.clear()
    assert tier.num_ready == 0 and sum(tier.reserve(key(number)) is not None for number in range(8)) == num_slots


@pytest.mark.req("KO-03")
@given(st.binary(min_size=1, max_size=32), st.integers(0, 2**32 - 1))
def test_a_pages_name_is_its_hash_and_its_group(block_hash, group):
    name = page_name(PageFile(group, block_hash))
    assert bytes.fromhex(name) == block_hash + group.to_bytes(4, "big")
    assert page_of(name) == PageFile(group, block_hash), "so no two groups, and no two blocks, share one"


def test_what_is_no_pages_name_is_nobodys():
    for name in ("", "about.json", "0011223", "00112233", "AABBCCDDEE", "0011223344.part"):
        assert page_of(name) is None
