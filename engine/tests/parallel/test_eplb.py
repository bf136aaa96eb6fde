"""Packing experts against brute force, and loads before and after on a skewed trace."""

from itertools import permutations, product

import numpy as np
import pytest

from penstock.engine.models.layers.placement import Placement
from penstock.engine.parallel.eplb import (
    Gift,
    LoadWindow,
    balancedness,
    better_placement,
    keep_slots,
    loads_of_ranks,
    moves,
    pack,
    rebalance,
    replicate,
)


def skewed(seed: int, experts: int) -> np.ndarray:
    """Loads of experts by Zipf's law, in any order."""
    generator = np.random.default_rng(seed)
    return generator.permutation(10_000 / np.arange(1, experts + 1) ** 1.2).round()


def test_packs_are_equally_full_and_within_the_bound_of_greedy_packing():
    """Against every way to fill two packs of three."""
    for seed in range(40):
        weights = skewed(seed, 6)
        found = pack(weights, 2)
        assert np.bincount(found).tolist() == [3, 3]
        sums = [weights[found == each].sum() for each in range(2)]
        best = min(max(weights[list(order[:3])].sum(), weights[list(order[3:])].sum()) for order in permutations(range(6)))
        assert best <= max(sums) <= best * 4 / 3  # Graham's bound of longest first
        assert abs(sums[0] - sums[1]) <= weights.max()
    with pytest.raises(ValueError, match="7 items cannot be divided among 2 packs"):
        pack(np.ones(7), 2)


@pytest.mark.req("DX-17")
def test_spare_slots_make_the_greatest_load_of_a_copy_as_small_as_any_way_can():
    """Against every number of copies of four experts in seven slots."""
    ways = [np.array(way) for way in product(range(1, 5), repeat=4) if sum(way) == 7]
    for seed in range(30):
        weights = skewed(seed, 4)
        greatest = [(weights / replicate(weights, slots)).max() for slots in range(4, 8)]
        assert greatest == sorted(greatest, reverse=True), "another slot never makes it worse"
        assert greatest[-1] == min((weights / way).max() for way in ways)
    with pytest.raises(ValueError, match="3 slots are fewer than 4 experts"):
        replicate(np.ones(4), 3)


@pytest.mark.req("DX-18")
def test_copies_stay_on_the_node_of_their_group():
    weights = skewed(1, 16)
    placed = rebalance(weights, slots=24, ranks=8, groups=4, nodes=2)
    nodes_of = [set((np.flatnonzero(placed // 4 == group) // 12).tolist()) for group in range(4)]
    assert [len(nodes) for nodes in nodes_of] == [1] * 4
    assert sorted(node for nodes in nodes_of for node in nodes) == [0, 0, 1, 1]
    assert set(placed.tolist()) == set(range(16))
    # Groups that do not divide: one node for all.
    assert set(rebalance(weights, 24, 8, groups=1, nodes=2).tolist()) == set(range(16))


def test_a_skewed_load_becomes_even_with_redundant_experts():
    """One expert of eight has 40 % of the work, on four ranks of two."""
    weights = np.array([40.0, 10, 10, 10, 10, 10, 5, 5])
    before = balancedness(loads_of_ranks(weights, np.arange(8), 4))
    assert before == 0.5
    placed = rebalance(weights, slots=12, ranks=4)
    assert balancedness(loads_of_ranks(weights, placed, 4)) > 0.9
    assert balancedness(np.zeros(4)) == 0.0
    for seed in range(10):
        weights = skewed(seed, 64)
        linear = Placement.linear(64, 8, 8).expert
        at_first, then = (loads_of_ranks(weights, of, 8) for of in (linear, rebalance(weights, 72, 8)))
        assert at_first.sum() == pytest.approx(then.sum()) == pytest.approx(weights.sum())
        assert then.max() / then.mean() < 1.06 < at_first.max() / at_first.mean()


@pytest.mark.req("DX-19")
def test_an_expert_that_stays_on_its_rank_keeps_its_slot():
    for seed in range(20):
        old = rebalance(skewed(seed, 12), 16, 4)
        new = rebalance(skewed(seed + 100, 12), 16, 4)
        kept = keep_slots(old, new, 4)
        for rank in range(4):
            before, after, wanted = (part[4 * rank : 4 * rank + 4].tolist() for part in (old, kept, new))
            assert sorted(after) == sorted(wanted)
            common = sum(min(before.count(expert), wanted.count(expert)) for expert in set(before))
            assert sum(a == b for a, b in zip(before, after, strict=True)) == common, "nothing else moves"


def test_what_moves_is_what_a_rank_lacks_and_each_is_given_once():
    old = Placement.of(np.array([0, 1, 2, 0, 3, 4]), np.array([0, 2, 4, 6]), 5)
    # Rank 0 gets a second copy of its own, rank 1 two of an expert, and rank 2 what both others have.
    found = moves(old, np.array([0, 0, 3, 3, 0, 4]))
    assert found.within == [(0, 1)]
    assert found.rounds == [{2: Gift(4, (2, 3)), 0: Gift(0, (4,))}]
    for seed in range(20):
        new = rebalance(skewed(seed, 12), 18, 3)
        old = Placement.of(rebalance(skewed(seed + 50, 12), 18, 3), np.array([0, 6, 12, 18]), 12)
        found, held = moves(old, new), old.expert.copy()
        for source, slot in found.within:
            assert old.rank_of[source] == old.rank_of[slot]
            held[slot] = old.expert[source]
        for gifts in found.rounds:
            for rank, gift in gifts.items():
                assert old.rank_of[gift.source] == rank
                held[list(gift.takers)] = old.expert[gift.source]
        assert (held == new).all()
        sources = [gift.source for gifts in found.rounds for gift in gifts.values()]
        assert len(sources) == len(set(sources)) and len(found.rounds) <= 6


def test_nothing_moves_where_nothing_is_gained():
    placed = Placement.linear(8, 4)
    assert better_placement(np.full(8, 3.0), placed) is None
    assert better_placement(np.zeros(8), placed) is None
    new = better_placement(np.array([40.0, 30, 1, 1, 1, 1, 1, 1]), placed)
    assert new is not None and loads_of_ranks(np.array([40.0, 30, 1, 1, 1, 1, 1, 1]), new, 4).max() == 41


def test_old_steps_are_forgotten():
    window = LoadWindow(2, 3, size=2)
    for step in range(3):
        window.add(np.full((2, 3), 10**step))
    assert (window.loads() == 110).all()


@pytest.mark.req("DX-12")
def test_every_expert_has_a_place_and_copies_share_its_tokens():
    placement = Placement.linear(7, 3)
    assert [list(placement.own(rank)) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert placement.local(1).tolist() == [-1, -1, -1, 0, 1, -1, -1]
    with pytest.raises(ValueError, match="2 experts on 3 ranks"):
        Placement.linear(2, 3)
    copies = Placement.linear(4, 2, redundant=2)
    assert copies.expert.tolist() == [0, 1, 2, 3, 0, 1]
    tokens = np.arange(3000)
    slots = copies.route(np.zeros((3000, 1), np.int64), tokens)[:, 0]
    assert set(slots.tolist()) == {0, 4} and abs(int((slots == 0).sum()) - 1500) < 30
    assert (copies.route(np.full((5, 1), 3), np.arange(5)) == 3).all()
