"""Experts that move between ranks while these compute with them."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import Ranks

from penstock.engine.config import ConfigError, EplbConfig
from penstock.engine.models.layers.linear_method import PrepackedLinearMethod
from penstock.engine.models.layers.placement import Placement
from penstock.engine.models.layers.projection import LinearLayer, Projection
from penstock.engine.models.layers.shard import Span
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.expert_exchange import ExpertExchange
from penstock.engine.parallel.expert_group import ExpertGroup
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.engine.stats import ExpertStats
from penstock.kernels.experts.reference import combine_rows
from penstock.kernels.ops import ops_for

EXPERTS, HIDDEN, CHOICES, RANKS, LAYERS, REDUNDANT = 12, 96, 2, 3, 3, 3
"""Slots of a rank: five, of each layer."""


class Layer:
    """Experts that multiply by a vector of their own."""

    hidden_size, top_k, dtype = HIDDEN, CHOICES, torch.float32

    def __init__(self, exchange: ExpertExchange, number: int) -> None:
        self.placement, self._rank = exchange.placed(EXPERTS), exchange.rank
        self.weights = vectors(number)
        self.slots = [self.weights[expert].clone() for expert in self.placement.own(self._rank)]
        self.placed = 0

    def held(self, slot: int) -> list[torch.Tensor]:
        return [self.slots[slot]]

    def place(self, placement: Placement) -> None:
        self.placement = placement
        self.placed += 1
        for slot, expert in enumerate(placement.own(self._rank)):
            assert torch.equal(self.slots[slot], self.weights[expert]), f"slot {slot} has not the weights of expert {expert}"

    def rows(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return x * torch.stack(self.slots)[slots.long()]

    def combine(self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combine_rows(results, places, weights)


def vectors(number: int) -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(number))


class Rank:
    """One rank's layers and exchange.

    Args:
        rank: Its number; each is a core of its own.
        memories: Of the steps and of the moves.
        eplb: When experts move.
    """

    def __init__(self, rank: int, memories: tuple[SharedMemory, SharedMemory], eplb: EplbConfig) -> None:
        steps, moves = memories
        self.exchange = ExpertExchange(ExpertGroup(rank, 1, steps, 20.0, None, moves, eplb), ops_for("cpu", torch.float32, None))
        self._draw = np.random.default_rng(rank)
        self.adopt()
        self.exchange.open()

    def adopt(self) -> None:
        self.layers = [Layer(self.exchange, number) for number in range(LAYERS)]
        self.exchange.adopt(self.layers)

    def step(self, busy: int) -> None:
        """Few tokens, of which most choose two experts; what comes is compared with what all experts would give."""
        tokens = int(self._draw.integers(0, 7))
        if not self.exchange.begin(tokens):
            return
        if not tokens:
            self.exchange.serve()
        for layer in self.layers if tokens else ():
            hidden = torch.from_numpy(self._draw.standard_normal((tokens, HIDDEN)).astype(np.float32))
            ids = (busy + self._draw.geometric(0.5, tokens)[:, None] + np.arange(CHOICES)) % EXPERTS
            weights = torch.rand(tokens, CHOICES)
            found = self.exchange.run(layer, hidden, torch.from_numpy(ids.astype(np.int32)), weights)
            results = (hidden[:, None] * layer.weights[torch.from_numpy(ids)]).view(-1, HIDDEN)
            places = torch.arange(tokens * CHOICES).view(tokens, CHOICES)
            assert torch.equal(found, combine_rows(results, places, weights)), "another expert has computed"

    @property
    def stats(self) -> ExpertStats:
        found = self.exchange.stats()
        assert found is not None
        return found


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """What each rank gives, after its life."""

    def run(life: Callable[[int, tuple[SharedMemory, SharedMemory]], Any]) -> list[Any]:
        memories = SharedMemory.create(RANKS, 1 << 12), SharedMemory.create(RANKS, 1 << 8)
        try:
            return Ranks(RANKS, lambda rank: life(rank, memories)).successes()
        finally:
            for memory in memories:
                memory.close()

    return run


@pytest.mark.req("DX-20", "DX-21")
def test_steps_and_moves_go_on_beside_each_other(on_ranks):
    """Busy experts change all the time, one rank's thread is slow, and the model is replaced in between: every step has the right
    results, no rank waits for ever, and all count the same."""

    def life(rank: int, memories: tuple[SharedMemory, SharedMemory]) -> tuple[ExpertStats, int, int]:
        one = Rank(rank, memories, EplbConfig(window_size=8, step_interval=3, num_redundant_experts=REDUNDANT))
        balancer = one.exchange._balancer
        assert balancer is not None
        gather, slow = balancer._mover._comm.gather_parts, 0.002 * (rank == 1)
        balancer._mover._comm.gather_parts = lambda *args: (time.sleep(slow), gather(*args))[1]  # type: ignore[method-assign]
        for step in range(150):
            one.step(busy=step // 14 * 5)
            if step in (60, 61, 110):
                one.adopt()
        before, step = one.stats.rebalances, 0
        while one.stats.rebalances < before + 2:
            one.step(busy=step // 14 * 5)
            step += 1
        return one.stats, sum(layer.placed for layer in one.layers), balancer._mover._num_served

    found = on_ranks(life)
    stats, placed, _ = found[0]
    assert found == [found[0]] * RANKS
    assert stats.rebalances > 2 and placed and stats.moved_bytes


@pytest.mark.req("DX-14", "DX-15", "DX-16", "OB-39")
def test_a_skewed_load_becomes_even_while_steps_run(on_ranks):
    """Counted by the tokens that ranks really compute."""

    def life(rank: int, memories: tuple[SharedMemory, SharedMemory]) -> list[tuple[float, list[int]]]:
        one = Rank(rank, memories, EplbConfig(window_size=40, step_interval=200, num_redundant_experts=REDUNDANT))
        told = list[tuple[float, list[int]]]()
        for step in range(130):
            one.step(busy=0)
            if step == 45:
                told.append((one.stats.balancedness, one.stats.served))
        while not one.stats.rebalances:
            one.step(busy=0)
        for _ in range(60):
            one.step(busy=0)
        return [*told, (one.stats.balancedness, one.stats.served)]

    found = on_ranks(life)
    assert found == [found[0]] * RANKS
    (before, served), (after, _) = found[0]
    assert before < 0.65 and after > before + 0.15, (before, after)
    assert max(served) > 1.5 * min(served)


@pytest.mark.req("DX-20")
def test_a_move_that_fails_on_one_rank_is_served_by_none_and_ends_them_all(on_ranks):
    """Rank 1 has no room for what it was sent; the others have all that they lacked. Each step before has the right results."""

    def life(rank: int, memories: tuple[SharedMemory, SharedMemory]) -> tuple[str, list[list[int]]]:
        one = Rank(rank, memories, EplbConfig(window_size=8, step_interval=3, num_redundant_experts=REDUNDANT))
        balancer = one.exchange._balancer
        assert balancer is not None
        mover = balancer._mover

        def full(*_: Any) -> list[torch.Tensor]:
            raise MemoryError("no room for an expert")

        if rank == 1:
            mover._taken = full  # type: ignore[method-assign]
        with pytest.raises(GroupFailed):
            while True:
                one.step(busy=0)
        one.exchange._comm.fail()  # as the end of its process
        mover.stop()
        for layer in one.layers:
            for slot, expert in enumerate(layer.placement.own(rank)):
                assert torch.equal(layer.slots[slot], layer.weights[expert])
        return str(mover._error), [layer.placement.expert.tolist() for layer in one.layers]

    found = on_ranks(life)
    assert found[1][0] == "no room for an expert"
    assert {told for told, _ in (found[0], found[2])} <= {"rank 1 has failed", "None"}
    assert all(placements == found[1][1] for _, placements in found), "no rank serves what another lacks"


def test_weights_whose_layout_is_not_known_are_refused_by_name():
    projection = Projection("down_proj", Span(16, 0, 16), Span(8, 0, 8), 0)
    method = PrepackedLinearMethod(LinearLayer("down_proj", (projection,), bias=False, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="--enable-eplb: experts whose weights are in oneDNN's layout do not move"):
        method.held()
