"""The cache's verbs, at the edges where blocks run out."""

from dataclasses import dataclass, field

import pytest

from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.prompt.hashing import BlockHasher

BLOCK = 4


@dataclass
class Sequence:
    index: int
    tokens: list[int]
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self):
        self.block_hashes = BlockHasher(BLOCK, "test").hash(self.tokens)


def make(num_blocks: int, *, caching: bool = True, watermark: float = 0.0) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=caching, watermark=watermark)


def state(kv: KVCacheManager):
    return list(kv.pool.free_list), list(kv.pool.ref_counts), sorted(kv.pool.cached_hashes())


def begin(kv: KVCacheManager, sequence: Sequence, count: int | None = None) -> int:
    """Admits a sequence; returns the tokens that it found cached."""
    hit = kv.lookup(sequence, len(sequence.tokens))
    assert kv.allocate(sequence, len(sequence.tokens) if count is None else count, hit) is not None
    return hit.num_tokens


def used_up(kv: KVCacheManager, sequence: Sequence) -> None:
    begin(kv, sequence)
    kv.commit(sequence, len(sequence.tokens))
    kv.free(sequence)


@pytest.mark.req("KV-15", "KV-14", "KV-16")
def test_a_block_is_added_when_a_token_crosses_its_border():
    kv, sequence = make(10), Sequence(1, [])
    kv.allocate(sequence, 0, kv.lookup(sequence, 0))
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
    assert kv.allocate(long, 21, hit) is None
    assert state(kv) == before


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
    (blocks,) = kv.allocate(again, 16, hit) or [[]]
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


@pytest.mark.req("KV-08", "PC-13")
def test_a_shared_block_outlives_its_first_owner():
    kv, prompt = make(10), list(range(9))
    first, second = Sequence(1, prompt), Sequence(2, prompt)
    begin(kv, first)
    kv.commit(first, 8)
    assert begin(kv, second) == 8
    kv.free(first)
    assert kv.pool.num_used == 3 and kv.usage == pytest.approx(3 / 9)
    kv.free(second)
    assert kv.pool.num_used == 0 and kv.usage == 0


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
