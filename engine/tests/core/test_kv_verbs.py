"""The cache's verbs in any order, against pages whose content is known: nobody ever finds a page that holds something else."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.cache.block_pool import NULL_BLOCK
from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.cache.layout import KVGroup, full_attention
from penstock.engine.cache.pins import Owner
from penstock.prompt.hashing import BlockHasher

BLOCK = 4
LAYOUTS = {
    "full": full_attention(BLOCK),
    "windows": (KVGroup((0,), BLOCK, None), KVGroup((1,), BLOCK, 6)),
    "sizes": (KVGroup((0,), BLOCK, None), KVGroup((1,), 2 * BLOCK, 9)),
}
VERBS = ["begin", "begin", "load", "loaded", "grow", "commit", "commit", "free", "pin", "unpin", "invalidate", "forget"]


@dataclass
class Sequence:
    index: int
    tokens: list[int]
    computed: int = 0
    room: int = 0
    awaited: int = 0
    """Where its external tokens end, while they are on their way."""
    block_hashes: list[bytes] = field(default_factory=list)


class Model:
    """The cache, and beside it what is written in each page."""

    def __init__(self, layout: tuple[KVGroup, ...], num_blocks: int) -> None:
        self.groups = layout
        self.kv = KVCacheManager(num_blocks, layout, enable_prefix_caching=True, watermark=0.0, max_in_flight=16)
        self.hasher = BlockHasher(BLOCK, "test")
        self.step = max(group.block_size for group in layout)
        self.pages: dict[int, tuple[int, ...] | None] = {}
        self.live: dict[int, Sequence] = {}
        self.pinned: dict[Owner, list[int]] = {}
        self.count = 0

    def act(self, verb: str, a: int, b: int) -> None:
        if verb in ("begin", "load"):
            self.begin(a, b, external=verb == "load")
        elif verb == "unpin":
            if self.pinned:
                owner = sorted(self.pinned)[a % len(self.pinned)]
                self.kv.unpin(self.pinned.pop(owner), owner)
        elif verb == "forget":
            hashes = self.hasher.hash(tokens_of(a))[: 1 + b % 6]
            self.kv.forget(hashes)
            assert not set(self.kv.cached_hashes()) & set(hashes)
        elif self.live:
            sequence = list(self.live.values())[a % len(self.live)]
            getattr(self, verb)(sequence, b)
        self.check()

    def begin(self, a: int, b: int, *, external: bool) -> None:
        self.count += 1
        tokens = tokens_of(a)
        sequence = Sequence(self.count, tokens, block_hashes=self.hasher.hash(tokens))
        local = self.kv.lookup(sequence, len(tokens))
        for number, (group, blocks) in enumerate(zip(self.groups, local.blocks, strict=True)):
            for at, block in enumerate(blocks):
                assert block == NULL_BLOCK or self.pages[block] == (number, *tokens[: (at + 1) * group.block_size])
        more = (len(tokens) - 1 - local.num_tokens) // self.step * self.step if external else 0
        room = min(local.num_tokens + more + (0 if more else 1 + b % 16), len(tokens))
        before = self.state()
        tables = self.kv.allocate(sequence, room, local=local, external=more)
        if tables is None:
            assert self.state() == before, "an allocation that fails changes nothing"
            return
        sequence.computed, sequence.room = local.num_tokens, room
        self.live[sequence.index] = sequence
        fresh = [[b for b in table[len(found) :] if b != NULL_BLOCK] for table, found in zip(tables, local.blocks, strict=True)]
        self.take(fresh)
        if more:
            sequence.awaited = local.num_tokens + more
            owner = Owner("load", sequence.index)
            self.pinned[owner] = [block for blocks in fresh for block in blocks]
            self.kv.pin(self.pinned[owner], owner)
            seen = [group.window is None or group.window > 1 for group in self.groups]
            assert all(blocks or not any_seen for blocks, any_seen in zip(fresh, seen, strict=True))

    def take(self, fresh: list[list[int]]) -> None:
        """Pages handed out: nobody else may have them."""
        for block in (block for blocks in fresh for block in blocks):
            assert self.kv.pool.ref_counts[block] == 1, "a page that somebody holds was handed out"
            self.pages[block] = None

    def loaded(self, sequence: Sequence, b: int) -> None:
        """What was on its way is there. The blocks are let go, and the next request finds them."""
        if not sequence.awaited:
            return
        owner = Owner("load", sequence.index)
        upto, sequence.awaited = sequence.awaited, 0
        self.compute(sequence, upto)
        if owner in self.pinned:
            self.kv.unpin(self.pinned.pop(owner), owner)
        assert self.kv.lookup(sequence, len(sequence.tokens)).num_tokens >= upto, "what was loaded is not found"

    def grow(self, sequence: Sequence, b: int) -> None:
        if sequence.awaited:
            return
        room, lookahead = min(sequence.room + b % 9, len(sequence.tokens)), b % 4
        before, tables = self.state(), self.kv.allocate(sequence, room, lookahead=lookahead)
        if tables is None:
            assert self.state() == before
            return
        sequence.room = room
        for table, group in zip(self.kv.tables(sequence), self.groups, strict=True):
            assert len(table) * group.block_size >= room + lookahead
        self.take(tables)

    def commit(self, sequence: Sequence, b: int) -> None:
        if not sequence.awaited:
            self.compute(sequence, min(sequence.computed + b % 9, sequence.room))

    def compute(self, sequence: Sequence, upto: int) -> None:
        for number, (group, table) in enumerate(zip(self.groups, self.kv.tables(sequence), strict=True)):
            for at in range(upto // group.block_size):
                written = (number, *sequence.tokens[: (at + 1) * group.block_size])
                if table[at] != NULL_BLOCK:
                    assert self.pages[table[at]] in (None, written), "a page is written by two"
                    self.pages[table[at]] = written
        self.kv.commit(sequence, upto)
        sequence.computed = max(sequence.computed, upto)

    def free(self, sequence: Sequence, b: int) -> None:
        self.kv.free(sequence)
        del self.live[sequence.index]

    def pin(self, sequence: Sequence, b: int) -> None:
        blocks = [block for table in self.kv.tables(sequence) for block in table if block != NULL_BLOCK][: 1 + b % 3]
        owner = Owner("copy", self.count)
        if not blocks or owner in self.pinned:
            return
        self.kv.pin(blocks, owner)
        self.pinned[owner] = blocks
        before = self.state()
        for wrong in (blocks[:1], [blocks[0], blocks[0]]):
            with pytest.raises(ValueError, match="twice"):
                self.kv.pin(wrong, owner)
        with pytest.raises(ValueError, match="does not hold"):
            self.kv.unpin(blocks, Owner("copy", -1))
        assert self.state() == before

    def invalidate(self, sequence: Sequence, b: int) -> None:
        tables = self.kv.tables(sequence)
        wrong = [block for table in tables for block in table][: 1 + b % 3]
        held = {
            other.index
            for other in self.live.values()
            if any(block in table for table in self.kv.tables(other) for block in wrong if block != NULL_BLOCK)
        }
        assert self.kv.invalidate(wrong) == sorted(held)
        for block in set(wrong) - {NULL_BLOCK}:
            self.pages[block] = (-1,)
        for index in held:
            self.free(self.live[index], 0)

    def state(self):
        pool = self.kv.pool
        return list(pool.free_list), list(pool.ref_counts), sorted(pool.cached_hashes())

    def check(self) -> None:
        held: Counter[int] = Counter()
        for sequence in self.live.values():
            for table in self.kv.tables(sequence):
                held.update(block for block in table if block != NULL_BLOCK)
        for blocks in self.pinned.values():
            held.update(blocks)
        pool = self.kv.pool
        assert {block: count for block, count in enumerate(pool.ref_counts) if count} == dict(held)
        assert len(pool.free_list) + len(held) == pool.num_blocks - 1 and not held.keys() & pool.free_list.keys()


def tokens_of(root: int) -> list[int]:
    """Three prompts that begin alike, and three others."""
    return [root % 2] * (9 if root % 3 else 22) + [10 + root % 6] * 19


@pytest.mark.req("KV-12", "KV-13")
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=150)
@given(
    st.integers(14, 60),
    st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 11), st.integers(0, 40)), max_size=60),
)
def test_in_any_order_of_verbs_a_page_is_what_it_is_found_for(layout, num_blocks, steps):
    model = Model(LAYOUTS[layout], num_blocks)
    for verb, a, b in steps:
        model.act(verb, a, b)
    for sequence in list(model.live.values()):
        model.free(sequence, 0)
    for owner, blocks in model.pinned.items():
        model.kv.unpin(blocks, owner)
    assert model.kv.pool.num_used == 0 and model.kv.reset()


def test_pages_that_are_being_loaded_outlive_their_request():
    model = Model(LAYOUTS["full"], 20)
    model.act("load", 0, 0)
    (sequence,) = model.live.values()
    [(owner, blocks)] = model.pinned.items()
    assert sequence.awaited == 40 and len(blocks) == 10
    model.act("free", 0, 0)
    assert model.kv.pool.num_used == 10 and not model.kv.cached_hashes(), "what has not come is not to be found"
    model.kv.unpin(blocks, owner)
    assert model.kv.pool.num_used == 0


def test_of_a_window_only_what_will_be_seen_is_loaded():
    model = Model(LAYOUTS["windows"], 40)
    model.act("load", 0, 0)
    (sequence,) = model.live.values()
    full, window = model.kv.tables(sequence)
    assert len(full) == len(window) == 10 and NULL_BLOCK not in full
    assert list(window[:8]) == [NULL_BLOCK] * 8, "token 40 sees tokens 35 to 40"
    model.act("loaded", 0, 0)
    assert model.kv.lookup(Sequence(99, sequence.tokens, block_hashes=sequence.block_hashes), 41).num_tokens == 40


@pytest.mark.parametrize("external", [3, -4, 48])
def test_external_tokens_are_whole_blocks_of_the_request(external):
    model, tokens = Model(LAYOUTS["full"], 20), tokens_of(0)
    sequence = Sequence(1, tokens, block_hashes=model.hasher.hash(tokens))
    with pytest.raises(ValueError, match="external tokens"):
        model.kv.allocate(sequence, 41, local=model.kv.lookup(sequence, 41), external=external)
    model.act("begin", 0, 0)
    with pytest.raises(ValueError, match="external tokens follow"):
        model.kv.allocate(next(iter(model.live.values())), 41, external=4)
