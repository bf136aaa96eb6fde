"""The cache's verbs, at the edges where blocks run out."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.events import BlockRemoved, BlockStored
from penstock.engine.cache.block_pool import NULL_BLOCK
from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.cache.layout import KVGroup, full_attention
from penstock.prompt.hashing import BlockHasher

BLOCK = 4


@dataclass
class Sequence:
    index: int
    tokens: list[int]
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self):
        self.block_hashes = BlockHasher(BLOCK, "test").hash(self.tokens)


def make(num_blocks: int, groups=(), *, caching: bool = True, watermark: float = 0.0) -> KVCacheManager:
    groups = groups or full_attention(BLOCK)
    return KVCacheManager(num_blocks, groups, enable_prefix_caching=caching, watermark=watermark, max_in_flight=16)


def state(kv: KVCacheManager):
    return list(kv.pool.free_list), list(kv.pool.ref_counts), sorted(kv.pool.cached_hashes())


def begin(kv: KVCacheManager, sequence: Sequence, count: int | None = None) -> int:
    """Admits a sequence; returns the tokens that it found cached."""
    hit = kv.lookup(sequence, len(sequence.tokens))
    assert kv.allocate(sequence, len(sequence.tokens) if count is None else count, local=hit) is not None
    return hit.num_tokens


def used_up(kv: KVCacheManager, sequence: Sequence) -> None:
    begin(kv, sequence)
    kv.commit(sequence, len(sequence.tokens))
    kv.free(sequence)


@pytest.mark.req("KV-15", "KV-14", "KV-16")
def test_a_block_is_added_when_a_token_crosses_its_border():
    kv, sequence = make(10), Sequence(1, [])
    kv.allocate(sequence, 0, local=kv.lookup(sequence, 0))
    grown = [count for count in range(1, 14) if kv.allocate(sequence, count) != [[]]]
    assert grown == [1, 5, 9, 13]
    (table,) = kv.tables(sequence)
    assert list(table) == [1, 2, 3, 4]


@pytest.mark.req("KV-09", "SCH-11")
@pytest.mark.parametrize("cached", [False, True])
def test_an_allocation_that_fails_changes_nothing(cached):
    kv, shared = make(7), list(range(9))
    if cached:
        used_up(kv, Sequence(1, shared))
    begin(kv, Sequence(2, [90] * 8))
    long = Sequence(3, shared + [7] * 12)
    before, hit = state(kv), kv.lookup(long, 21)
    assert hit.num_tokens == (8 if cached else 0)
    assert kv.allocate(long, 21, local=hit) is None
    assert state(kv) == before


@pytest.mark.req("KV-09")
def test_requests_grow_together_or_not_at_all():
    kv = make(10, [KVGroup((0,), BLOCK, None), KVGroup((1,), 2 * BLOCK, None)])
    pair = Sequence(1, [1] * BLOCK), Sequence(2, [2] * BLOCK)
    for sequence in pair:
        begin(kv, sequence)
    before = state(kv)
    assert kv.grow(pair, [3 * BLOCK, 4 * BLOCK]) is None, "7 blocks, of which 5 are free"
    assert state(kv) == before
    # As one request after the other would have taken them.
    assert kv.grow(pair, [3 * BLOCK, 2 * BLOCK]) == [[[5, 6], [7]], [[8], []]]
    assert [list(table) for sequence in pair for table in kv.tables(sequence)] == [[1, 5, 6], [2, 7], [3, 8], [4]]


@pytest.mark.req("KV-12", "KV-13", "PC-13")
def test_hits_that_nobody_holds_use_up_free_blocks_and_are_never_evicted_by_their_own_request():
    kv, prompt = make(5), list(range(16))
    used_up(kv, Sequence(1, prompt))  # all four blocks are free, and cached
    again = Sequence(2, prompt)
    hit = kv.lookup(again, 16)
    assert hit.num_tokens == 12
    # Three hits and one new block: just enough, and the new one is the fourth, not one of the three.
    assert not kv.can_admit(17, hit, reserved=0, alone=True)
    assert kv.can_admit(16, hit, reserved=0, alone=True)
    (blocks,) = kv.allocate(again, 16, local=hit) or [[]]
    assert blocks[:3] == hit.blocks[0] and len(set(blocks)) == 4 and kv.pool.num_free == 0


@pytest.mark.req("PC-10", "PC-28", "PC-32")
@pytest.mark.parametrize(("length", "hits"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (20, 12)])
def test_a_hit_ends_before_the_last_token_and_at_a_block_border(length, hits):
    kv = make(20)
    used_up(kv, Sequence(1, list(range(14))))  # 12 of its tokens are in full blocks
    assert begin(kv, Sequence(2, list(range(length)))) == hits
    assert kv.lookup(Sequence(3, [9, *range(1, 14)]), 14).num_tokens == 0


@pytest.mark.req("PC-09")
def test_the_walk_stops_at_the_first_miss():
    kv, tokens = make(20), list(range(16))
    used_up(kv, Sequence(1, tokens))
    looked_up = []
    real = kv.pool.lookup
    kv.pool.lookup = lambda group, block_hash: looked_up.append(block_hash) or real(group, block_hash)
    assert kv.lookup(Sequence(2, tokens[:8] + [99] * 12), 20).num_tokens == 8
    assert len(looked_up) == 3


@pytest.mark.req("KV-20", "PC-16")
def test_the_tail_of_a_freed_sequence_is_evicted_before_its_root():
    kv, sequence = make(4), Sequence(1, list(range(12)))
    used_up(kv, sequence)
    begin(kv, Sequence(2, [99]))
    assert [kv.pool.lookup(0, block_hash) is not None for block_hash in sequence.block_hashes] == [True, True, False]


@pytest.mark.req("KV-08", "PC-13", "OB-07")
def test_a_shared_block_outlives_its_first_owner():
    kv, prompt = make(10), list(range(9))
    first, second = Sequence(1, prompt), Sequence(2, prompt)
    begin(kv, first)
    kv.commit(first, 8)
    assert begin(kv, second) == 8
    kv.free(first)
    assert kv.pool.num_used == 3 and kv.usage == pytest.approx(3 / 9)
    kv.free(second)
    assert kv.pool.num_used == 0 and kv.usage == 0 and kv.pool.cached_hashes()


@pytest.mark.req("PC-18", "PC-33")
def test_only_committed_full_blocks_are_found():
    kv, prompt = make(10), list(range(12))
    first = Sequence(1, prompt)
    begin(kv, first)
    found = []
    for upto in (3, 4, 7, 8, 8, 12):
        kv.commit(first, upto)
        found.append(kv.lookup(Sequence(2, [*prompt, 1]), 13).num_tokens)
    assert found == [0, 4, 4, 8, 8, 12]


@pytest.mark.req("PRE-09", "PRE-10")
def test_admission_leaves_the_watermark_unless_nobody_else_runs():
    kv = make(101, watermark=0.1)  # 100 usable, 11 kept
    hit = kv.lookup(Sequence(1, [1] * 4), 4)
    assert kv.can_admit(89 * BLOCK, hit, reserved=0, alone=False)
    assert not kv.can_admit(90 * BLOCK, hit, reserved=0, alone=False)
    assert not kv.can_admit(89 * BLOCK, hit, reserved=1, alone=False)
    assert kv.can_admit(100 * BLOCK, hit, reserved=0, alone=True)
    assert not kv.can_admit(101 * BLOCK, hit, reserved=0, alone=True)


@pytest.mark.req("PC-25")
def test_without_caching_nothing_is_published():
    kv = make(10, caching=False)
    used_up(kv, Sequence(1, list(range(8))))
    assert begin(kv, Sequence(2, list(range(8)))) == 0 and not kv.pool.cached_hashes()


WINDOW = KVGroup((1,), BLOCK, 10)
"""Sees nine tokens before its own: three blocks at most."""
HYBRID = (KVGroup((0,), BLOCK, None), WINDOW)


@pytest.mark.req("KV-22", "KV-25")
def test_blocks_behind_the_window_are_given_back_while_the_request_runs():
    kv, sequence = make(100, HYBRID), Sequence(1, list(range(60)))
    begin(kv, sequence, 1)
    for length in range(2, 61):
        assert kv.allocate(sequence, length) is not None
        kv.commit(sequence, length)
        full, windowed = kv.tables(sequence)
        first = max(0, length - 9) // BLOCK
        assert list(windowed[:first]) == [NULL_BLOCK] * first and NULL_BLOCK not in windowed[first:]
        assert len(windowed) - first <= 10 // BLOCK + 2
        assert len(full) == len(windowed) == -(-length // BLOCK) and NULL_BLOCK not in full
    kv.free(sequence)
    assert kv.pool.num_used == 0


@pytest.mark.req("KV-25")
def test_without_caching_windows_are_bounded_too():
    kv, sequence = make(30, [WINDOW], caching=False), Sequence(1, list(range(40)))
    begin(kv, sequence, 16)
    kv.commit(sequence, 16)
    assert list(kv.tables(sequence)[0]) == [NULL_BLOCK, 2, 3, 4] and kv.pool.num_used == 3
    assert kv.needs_commits and not kv.cached_hashes()


@pytest.mark.req("KV-24", "PC-09", "PC-31")
def test_a_hit_needs_all_of_full_attention_and_the_end_of_the_window():
    kv, tokens = make(100, HYBRID), list(range(48))
    used_up(kv, Sequence(1, tokens))
    evict(kv, 1, tokens, 1)  # far behind every window that ends at 48
    hit = kv.lookup(Sequence(2, [*tokens, 1]), 49)
    assert hit.num_tokens == 48 and hit.blocks[1][:9] == [NULL_BLOCK] * 9 and NULL_BLOCK not in hit.blocks[1][9:]
    evict(kv, 1, tokens, 10)  # 7 to 9 are there still: an end at 40
    assert kv.lookup(Sequence(2, [*tokens, 1]), 49).num_tokens == 40
    evict(kv, 0, tokens, 8)
    evict(kv, 1, tokens, 5)  # ends at 32 need 5 to 7, ends at 20 need 2 to 4
    assert kv.lookup(Sequence(2, [*tokens, 1]), 49).num_tokens == 20
    # The window group has from the left no more than block 0.
    evict(kv, 1, tokens, 3)
    assert kv.lookup(Sequence(2, [*tokens, 1]), 49).num_tokens == 4
    assert kv.lookup(Sequence(2, tokens[:4]), 4).num_tokens == 0


def evict(kv: KVCacheManager, group: int, tokens: list[int], at: int) -> None:
    """Makes the pool forget one block of one group."""
    block = kv.pool.lookup(group, Sequence(0, tokens).block_hashes[at])
    assert block is not None
    kv.pool._evict(block)


@pytest.mark.req("KV-23")
def test_a_hit_ends_where_blocks_of_all_groups_end():
    groups = (KVGroup((0,), BLOCK, None), KVGroup((1,), 3 * BLOCK, None), KVGroup((2,), 2 * BLOCK, 5))
    kv, tokens = make(100, groups), list(range(90))
    used_up(kv, Sequence(1, tokens))
    for length in range(1, 90):
        hit = kv.lookup(Sequence(2, tokens[:length]), length)
        assert hit.num_tokens == (length - 1) // 24 * 24
        assert [len(blocks) for blocks in hit.blocks] == [hit.num_tokens // group.block_size for group in groups]


def test_events_name_every_hash_though_blocks_of_full_attention_are_larger():
    """A reader walks a prompt's hashes from the first one to the first that is missing."""
    kv = make(100, (KVGroup((0,), 3 * BLOCK, None), KVGroup((1,), BLOCK, 6)))
    first, second = Sequence(1, list(range(30))), Sequence(2, [*range(20), 98, 99, 97, 96, 95])
    used_up(kv, first)
    used_up(kv, second)
    stored = [*first.block_hashes[:6], second.block_hashes[5]]  # hash 3 and 4 are in the second block of both
    assert kv.events.take() == [BlockStored(stored)] and list(kv.cached_hashes()) == stored
    assert kv.lookup(first, 30).num_tokens == 24
    evict(kv, 0, first.tokens, 5)
    assert kv.events.take() == [BlockRemoved([first.block_hashes[5]])], "the other block holds the others"
    evict(kv, 0, second.tokens, 5)
    assert kv.events.take() == [BlockRemoved(second.block_hashes[3:6])]
    assert list(kv.cached_hashes()) == first.block_hashes[:3]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11)), max_size=20), st.integers(1, 50))
@pytest.mark.req("KV-24")
def test_the_hit_is_the_longest_on_which_all_groups_agree(missing, length):
    """Against a search over all lengths."""
    groups = (KVGroup((0,), BLOCK, None), KVGroup((1,), BLOCK, 10), KVGroup((2,), 2 * BLOCK, 9))
    kv, tokens = make(100, groups), list(range(48))
    used_up(kv, Sequence(1, tokens))
    for group, at in missing:
        step = groups[group].block_size // BLOCK
        if (block := kv.pool.lookup(group, Sequence(0, tokens).block_hashes[at // step * step + step - 1])) is not None:
            kv.pool._evict(block)
    prompt = Sequence(2, (tokens + [99] * 9)[:length])

    def usable(end: int) -> bool:
        for number, group in enumerate(groups):
            step = group.block_size // BLOCK
            first = 0 if group.window is None else max(0, end - group.window + 1) // group.block_size
            for at in range(first, end // group.block_size):
                if kv.pool.lookup(number, prompt.block_hashes[(at + 1) * step - 1]) is None:
                    return False
        return True

    expected = max(end for end in range(0, length, 2 * BLOCK) if end <= 48 and usable(end))
    assert kv.lookup(prompt, length).num_tokens == expected


@pytest.mark.req("KV-09")
def test_admission_with_windows_counts_what_a_sequence_holds_at_once():
    kv = make(19, [WINDOW])  # at most 3 + 16 / 4 + 1 = 8 blocks each
    hit = kv.lookup(Sequence(1, [1]), 1)
    assert kv.blocks_for(1000) == 8 and kv.longest(1000) == 1000
    assert kv.can_admit(1000, hit, reserved=10, alone=True) and not kv.can_admit(1000, hit, reserved=11, alone=True)
    assert not kv.can_admit(17, hit, reserved=14, alone=True) and kv.can_admit(16, hit, reserved=14, alone=True)


def test_what_made_a_request_fail_is_found_by_nobody():
    kv, prompt = make(60, HYBRID), list(range(20))
    used_up(kv, Sequence(1, prompt))
    failing, beside = Sequence(2, [*prompt, 9, 9, 9, 9, 9]), Sequence(3, [*prompt, 8])
    begin(kv, failing)
    kv.commit(failing, 24)
    assert begin(kv, beside) == 20
    kv.forget(failing.block_hashes)
    kv.free(failing)
    assert not kv.cached_hashes() and kv.lookup(Sequence(4, [*prompt, 8]), 21).num_tokens == 0
    # Who holds blocks of it goes on with them, and they are free afterwards.
    kv.commit(beside, 21)
    kv.free(beside)
    assert kv.pool.num_used == 0 and not kv.cached_hashes()
