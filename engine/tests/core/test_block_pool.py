"""The block pool against a naive one, and its rules one by one."""

import gc
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored
from penstock.engine.cache import block_pool
from penstock.engine.cache.block_pool import NULL_BLOCK, BlockPool
from penstock.engine.cache.events import BlockEvents


def make(num_blocks: int, num_groups: int = 1) -> BlockPool:
    return BlockPool(num_blocks, num_groups, BlockEvents())


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


@pytest.mark.req("KV-07", "KV-08", "KV-29", "PC-13", "PC-15", "PC-16", "PC-17", "PC-24")
@settings(max_examples=200)
@given(st.data())
def test_any_sequence_of_operations_matches_a_naive_pool(data):
    """The naive pool: a list for the free blocks, a dictionary block → name, everything searched."""
    num_blocks = data.draw(st.integers(2, 9))
    pool, free, names = make(num_blocks), list(range(1, num_blocks)), {}
    held: list[int] = []
    live: set[bytes] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["take", "free", "cache", "hit", "forget"])):
            case "take":
                count = data.draw(st.integers(0, 4))
                if count > len(free):
                    before = (list(pool.free_list), list(pool.ref_counts))
                    with pytest.raises(ValueError, match=f"{count} blocks wanted, {len(free)} free"):
                        pool.get_new_blocks(count)
                    assert before == (list(pool.free_list), list(pool.ref_counts))
                    continue
                expected, free = free[:count], free[count:]
                assert pool.get_new_blocks(count) == expected
                for block in expected:
                    names.pop(block, None)
                held += expected
            case "free" if held:
                block = held.pop(data.draw(st.integers(0, len(held) - 1)))
                pool.free([block])
                if block not in held:
                    free.insert(len(free) if block in names else 0, block)
            case "cache" if uncached := [block for block in held if block not in names]:
                block, names[uncached[0]] = uncached[0], name(data.draw(st.integers(0, 3)))
                pool.cache(0, block, [names[block]])
            case "forget":
                forgotten = name(data.draw(st.integers(0, 3)))
                pool.forget(forgotten)
                for block in [block for block, one in names.items() if one == forgotten]:
                    del names[block]
                    if block in free:
                        free.remove(block)
                        free.insert(0, block)
            case "hit":
                wanted = name(data.draw(st.integers(0, 3)))
                block = pool.lookup(0, wanted)
                assert (block is None) == (wanted not in names.values())
                if block is not None:
                    assert names[block] == wanted
                    pool.touch([block])
                    held.append(block)
                    free = [other for other in free if other != block]
        assert list(pool.free_list) == free and pool.num_free == len(free)
        assert pool.ref_counts == [held.count(block) for block in range(num_blocks)]
        assert set(pool.cached_hashes()) == set(names.values())
        for event in pool._events.take():
            match event:
                case BlockStored(hashes):
                    live |= set(hashes)
                case BlockRemoved(hashes):
                    live -= set(hashes)
        assert live == set(names.values())


@pytest.mark.req("KV-05")
def test_the_null_block_is_nobodys():
    pool = make(4)
    assert NULL_BLOCK not in pool.get_new_blocks(3)
    with pytest.raises(ValueError, match="1 blocks wanted, 0 free"):
        pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="the null block and one more"):
        make(1)


@pytest.mark.req("KV-06")
def test_operations_leave_no_objects_behind():
    """A block is a number in some lists: what is taken, cached, found and freed again leaves memory as it was."""
    pool = make(1000)
    names = [name(number) for number in range(2000)]

    def cycle() -> None:
        for first in range(0, 2000, 50):
            blocks = pool.get_new_blocks(50)
            for block, one in zip(blocks, names[first : first + 50], strict=True):
                pool.cache(0, block, [one])
            pool.free(reversed(blocks))
            found = [pool.lookup(0, one) for one in names[first : first + 50]]
            pool.touch(block for block in found if block is not None)
            pool.free(block for block in found if block is not None)
        pool._events.take()

    def held() -> int:
        """Bytes allocated by the pool's own lines: other tests' leftovers and threads do not count."""
        gc.collect()
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, block_pool.__file__)])
        return sum(trace.size for trace in snapshot.traces)

    tracemalloc.start()
    try:
        cycle()
        cycle()
        before = held()
        for _ in range(5):
            cycle()
        # 10,000 blocks went through: one object of the smallest size for each would be 160 kB.
        assert held() - before < 10_000
    finally:
        tracemalloc.stop()


def test_freeing_what_nobody_holds_is_an_error():
    pool = make(4)
    blocks = pool.get_new_blocks(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.free(blocks)


@pytest.mark.req("PC-31")
def test_groups_do_not_share_names():
    pool = make(4, num_groups=2)
    first, second = pool.get_new_blocks(2)
    pool.cache(0, first, [name(1)])
    assert pool.lookup(1, name(1)) is None
    pool.cache(1, second, [name(1)])
    pool.free([first])
    pool.get_new_blocks(2)
    assert pool.lookup(0, name(1)) is None and pool.lookup(1, name(1)) == second


@pytest.mark.req("PC-21")
def test_reset_waits_for_the_last_holder_and_then_forgets_everything():
    pool = make(4)
    blocks = pool.get_new_blocks(2)
    pool.cache(0, blocks[0], [name(1)])
    assert not pool.reset() and pool.lookup(0, name(1)) == blocks[0]
    pool.free(blocks)
    assert pool.reset() and pool.lookup(0, name(1)) is None
    assert pool._events.take() == [AllBlocksCleared()]
    # The blocks are as good as new: nothing is evicted that was forgotten before.
    pool.cache(0, pool.get_new_blocks(1)[0], [name(2)])
    assert pool._events.take() == [BlockStored([name(2)])]


@pytest.mark.req("PC-33")
def test_a_block_is_published_once():
    pool = make(4)
    (block,) = pool.get_new_blocks(1)
    pool.cache(0, block, [name(1)])
    with pytest.raises(ValueError, match="cached already"):
        pool.cache(0, block, [name(1)])


def test_neighbouring_events_of_a_kind_are_one():
    pool = make(6)
    blocks = pool.get_new_blocks(5)
    for number, block in enumerate(blocks[:3]):
        pool.cache(0, block, [name(number)])
    pool.free(reversed(blocks))
    pool.get_new_blocks(4)
    assert pool._events.take() == [BlockStored([name(0), name(1), name(2)]), BlockRemoved([name(2), name(1)])]
