"""The residency index against one set of blocks a replica."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from picks import replica

from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.request import Prompt
from penstock.gateway.picker.resident import ResidentColumn
from penstock.gateway.residency.index import ResidencyIndex

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

KEYS = [ReplicaKey(uid, 8000) for uid in "abcd"]
BLOCKS = [bytes([n]) * 32 for n in range(12)]
operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear", "drop"]),
        st.sampled_from(KEYS),
        st.lists(st.sampled_from(BLOCKS), max_size=8),
    ),
    max_size=40,
)


def naive_prefix(own: set[bytes], hashes: list[bytes]) -> int:
    return next((at for at, block in enumerate(hashes) if block not in own), len(hashes))


@pytest.mark.req("RT-19", "RT-20", "RT-24", "RT-27")
@given(operations, st.lists(st.sampled_from(BLOCKS), max_size=10))
def test_any_history_scores_as_the_sets_do(history: list[tuple[str, ReplicaKey, list[bytes]]], query: list[bytes]) -> None:
    index = ResidencyIndex()
    sets: dict[ReplicaKey, set[bytes]] = {key: set() for key in KEYS}
    for verb, key, blocks in history:
        match verb:
            case "store":
                index.store(key, blocks)
                sets[key] |= set(blocks)
            case "remove":
                index.remove(key, blocks)
                sets[key] -= set(blocks)
            case _:
                getattr(index, verb)(key)
                sets[key].clear()
    expected = {key: naive_prefix(own, query) for key, own in sets.items()}
    assert index.longest_prefix(query) == {key: depth for key, depth in expected.items() if depth}
    assert len(index) == len(set().union(*sets.values()))
    assert {key: index.blocks(key) for key in KEYS} == {key: len(own) for key, own in sets.items()}


def test_a_bit_that_is_given_out_again_carries_nothing_over() -> None:
    index = ResidencyIndex()
    old, new = KEYS[:2]
    index.store(old, BLOCKS)
    index.drop(old)
    index.store(new, BLOCKS[:1])
    assert index.longest_prefix(BLOCKS) == {new: 1}


def test_emptying_one_replica_leaves_the_others() -> None:
    index = ResidencyIndex()
    for key in KEYS[:2]:
        index.store(key, BLOCKS)
    index.clear(KEYS[0])
    assert index.longest_prefix(BLOCKS) == {KEYS[1]: 12}


@pytest.mark.req("RT-19")
@given(st.lists(st.integers(0, 12), max_size=60), st.integers(1, 16 * 13))
def test_a_column_shows_of_each_replica_what_the_index_says(cached: list[int], tokens: int) -> None:
    """Few replicas and many are looked up in different ways; replicas of other models are in the index too."""
    index, columns = ResidencyIndex(), Columns()
    replicas = [replica(at) for at in range(len(cached))]
    for there, count in zip(replicas, cached, strict=True):
        index.store(key_of(there), BLOCKS[:count])
    columns.update(replicas[::2])
    supplied = ResidentColumn(index, columns).tokens([Prompt(tokens, tuple(BLOCKS))], 16, None)
    most = (tokens - 1) // 16
    expected = {key_of(there): 16 * min(count, most) for there, count in zip(replicas, cached, strict=True)}
    assert supplied.tolist() == [expected[key_of(there)] for there in replicas[::2]]
