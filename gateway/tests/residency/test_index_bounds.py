"""The residency index within its bounds: what it drops, in which order, and what emptying a replica leaves behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.residency.index import SWEPT_AT_ONCE, Knowledge, ResidencyIndex

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

A, B, C = KEYS = [ReplicaKey(uid, 8000) for uid in "abc"]


def block(n: int) -> bytes:
    return n.to_bytes(32, "big")


def blocks(*numbers: int) -> list[bytes]:
    return [block(n) for n in numbers]


class Lru:
    """One replica's blocks as a list, the least recently used first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.order: list[bytes] = []

    def use(self, hashes: list[bytes], store: bool) -> None:
        for wanted in hashes:
            if store or wanted in self.order:
                self.order = [known for known in self.order if known != wanted] + [wanted]
        self.order = self.order[max(0, len(self.order) - self.limit) :]

    def remove(self, hashes: list[bytes]) -> None:
        self.order = [known for known in self.order if known not in hashes]


def prefix(known: list[bytes], query: list[bytes]) -> int:
    return next((at for at, wanted in enumerate(query) if wanted not in known), len(query))


histories = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "used", "remove", "clear", "drop", "sweep"]),
        st.sampled_from(KEYS),
        st.lists(st.integers(0, 40), max_size=8, unique=True),
    ),
    max_size=60,
)


@pytest.mark.req("RT-24", "RT-27")
@given(histories, st.integers(1, 12), st.lists(st.lists(st.integers(0, 40), max_size=6), max_size=5))
def test_a_bound_drops_what_was_used_least_recently(
    history: list[tuple[str, ReplicaKey, list[int]]], limit: int, queries: list[list[int]]
) -> None:
    index = ResidencyIndex(per_replica=limit)  # below 64 blocks, batches are single ones: the order is exact
    models = {key: Lru(limit) for key in KEYS}
    for verb, key, numbers in history:
        hashes, model = blocks(*numbers), models[key]
        match verb:
            case "store":
                index.store(key, hashes)
                model.use(hashes, store=True)
            case "used":
                # The order of use is kept only where it matters: near the bound. Where it is not kept, nothing is dropped by it.
                if index.blocks(key) >= 0.9 * limit:
                    model.use(hashes, store=False)
                index.used(key, hashes)
            case "remove":
                index.remove(key, hashes)
                model.remove(hashes)
            case "sweep":
                index.sweep(3)
            case _:
                getattr(index, verb)(key)
                model.order = []
        assert all(index.blocks(key) <= limit for key in KEYS)
    for numbers in queries:
        query = blocks(*numbers)
        expected = {key: prefix(model.order, query) for key, model in models.items()}
        assert index.longest_prefix(query) == {key: depth for key, depth in expected.items() if depth}
    assert index.entries == sum(len(model.order) for model in models.values())


@pytest.mark.req("RT-27")
def test_all_replicas_together_are_bounded_at_the_largest_ones_cost() -> None:
    index = ResidencyIndex(total=100)
    index.store(A, blocks(*range(20)))
    index.store(B, blocks(*range(100, 190)))
    assert index.entries <= 100
    assert index.blocks(A) == 20
    assert index.dropped == 110 - index.entries > 0
    assert index.longest_prefix(blocks(100)) == {}
    assert index.longest_prefix(blocks(189)) == {B: 1}


@pytest.mark.req("RT-27")
def test_churn_of_replicas_and_blocks_leaves_no_more_than_the_bound() -> None:
    index = ResidencyIndex(per_replica=500, total=2_000)
    for generation in range(60):
        for n in range(4):
            key = ReplicaKey(f"{generation}-{n}", 8000)
            index.store(key, blocks(*range(generation * 1000, generation * 1000 + 700)))
            if generation:
                index.drop(ReplicaKey(f"{generation - 1}-{n}", 8000))
        assert index.entries <= 2_000
        assert len(index) <= 2_000
    for n in range(4):
        index.drop(ReplicaKey(f"59-{n}", 8000))
    assert (index.entries, len(index)) == (0, 0)


@pytest.mark.req("RT-10")
def test_emptying_a_large_replica_counts_at_once_and_is_swept_later() -> None:
    index = ResidencyIndex()
    many = 5 * SWEPT_AT_ONCE
    index.store(A, blocks(*range(many)))
    index.store(B, blocks(0, 1))
    index.clear(A)
    assert index.longest_prefix(blocks(0, 1, 2)) == {B: 2}
    assert (index.blocks(A), index.entries) == (0, 2)
    assert len(index) == many
    index.store(A, blocks(0))  # under a new bit: nothing of what is still to be swept is its
    assert index.longest_prefix(blocks(0, 1, 2)) == {A: 1, B: 2}
    while index.sweep(SWEPT_AT_ONCE):
        assert index.longest_prefix(blocks(0, 1, 2)) == {A: 1, B: 2}
    assert len(index) == 2
    index.store(C, blocks(0, 1, 2))  # may get the bit that was swept
    assert index.longest_prefix(blocks(0, 1, 2)) == {A: 1, B: 2, C: 3}


def test_storing_sweeps_what_was_emptied() -> None:
    index = ResidencyIndex()
    index.store(A, blocks(*range(3 * SWEPT_AT_ONCE)))
    index.clear(A)
    for n in range(3):
        index.store(B, blocks(n))
    assert len(index) == 3


def test_a_replicas_own_limit_holds_within_the_bound_for_all() -> None:
    index = ResidencyIndex(per_replica=10)
    index.store(A, blocks(*range(10)))
    index.set_limit(A, 4)
    assert index.longest_prefix(blocks(6, 7, 8, 9)) == {A: 4}
    assert index.blocks(A) == 4
    index.set_limit(A, 1000)
    assert index.limit(A) == 10
    index.clear(A)
    assert index.limit(A) == 10


def test_nothing_is_known_of_a_replica_that_has_gone() -> None:
    index = ResidencyIndex()
    index.set_knowledge(A, Knowledge.EXACT)
    index.drop(A)
    assert index.knowledge(A) is Knowledge.UNKNOWN
