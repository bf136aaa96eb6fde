"""Blocks behind the KV caches: what the events say of them, what they are worth, and what is expected of an answer."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from picks import report

from penstock.api.events import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, Medium, RequestFinished
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.choice import Choice, choose
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState
from penstock.gateway.residency.index import ResidencyIndex
from penstock.gateway.residency.tiers import PRIOR_COSTS, Tiers, load_cost

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

MODEL = Model(id="ns/m", served_names=["m"])
SIZE = 16
CHAIN = tuple(bytes([at]) * 32 for at in range(101))
ASKED = RequestView(id="1", path="", model="m", prompts=(Prompt(100 * SIZE + 1, CHAIN[:100]),))


class World:
    """Replicas by number, all with one load."""

    def __init__(self, count: int) -> None:
        self.state = FleetState()
        known = {"pool": "p", "port": 8000, "events_port": 1, "replay_port": 2, "ready": True}
        self.replicas = [Replica(uid=f"u{at}", name=f"r{at}", host=f"10.0.0.{at}", **known) for at in range(count)]
        self.update(self.replicas)
        for at in range(count):
            self.report(at)

    def update(self, replicas: list[Replica]) -> None:
        self.state.update(Fleet(models=[MODEL], pools=[Pool(id="p", model=MODEL.id)], replicas=replicas))

    def key(self, at: int) -> ReplicaKey:
        return key_of(self.replicas[at])

    def report(self, at: int, *, seq: int = 1, **figures: float) -> None:
        self.state.reported(self.key(at), report(seq=seq, prefill_tokens_per_s=1_000.0, **figures), 0.0)

    def stored(self, at: int, blocks: tuple[bytes, ...], medium: Medium | None = None) -> None:
        self.state.event(self.key(at), BlockStored(list(blocks), medium), 0.0)

    def removed(self, at: int, blocks: tuple[bytes, ...], medium: Medium | None = None) -> None:
        self.state.event(self.key(at), BlockRemoved(list(blocks), medium), 0.0)

    def found(self, at: int = 0) -> int:
        return int(self.state.slates.of(MODEL, ASKED, 0.0).found[at]) // SIZE

    def pick(self, *excluded: int) -> Choice:
        return choose(self.state.slates.of(MODEL, ASKED, 0.0, excluded=[self.key(at) for at in excluded]), "Cost")


@pytest.mark.req("RT-26")
def test_a_hit_in_the_kv_cache_is_preferred_and_one_in_a_tier_is_better_than_none() -> None:
    world = World(4)
    world.stored(1, CHAIN[:60], "disk")
    world.stored(2, CHAIN[:60])
    world.stored(3, CHAIN[:60], "memory")
    order = [world.pick(), world.pick(2), world.pick(2, 3), world.pick(1, 2, 3)]
    assert [choice.replica.name for choice in order] == ["r2", "r3", "r1", "r0"]
    assert [choice.resident_tokens for choice in order] == [60 * SIZE, 60 * SIZE, 60 * SIZE, 0]


def test_a_tier_is_worth_what_its_replica_has_measured() -> None:
    world = World(3)
    world.stored(0, CHAIN[:60], "memory")
    world.stored(1, CHAIN[:60], "memory")
    world.stored(2, CHAIN[:10])
    world.report(0, seq=2, memory_tier_tokens_per_s=4_000.0)
    world.report(1, seq=2, memory_tier_tokens_per_s=2_000.0)
    assert world.state.slates.of(MODEL, ASKED, 0.0).resident.tolist() == [60 * SIZE * 3 / 4, 60 * SIZE / 2, 10 * SIZE]
    assert world.pick().replica.name == "r0" and world.pick(0).replica.name == "r1"
    # Where a load takes longer than to compute the tokens, the engine computes them: nothing is expected of the tier.
    world.report(0, seq=3, memory_tier_tokens_per_s=900.0)
    world.report(1, seq=3, memory_tier_tokens_per_s=1_000.0)
    assert [world.found(at) for at in range(3)] == [0, 0, 10] and world.pick().replica.name == "r2"


def test_what_nobody_has_measured_has_a_cost_by_tier() -> None:
    for medium in MEDIA:
        assert load_cost(medium, None) == load_cost(medium, report(prefill_tokens_per_s=5.0)) == PRIOR_COSTS[medium] < 1
    assert load_cost("disk", report(prefill_tokens_per_s=10.0, disk_tier_tokens_per_s=40.0)) == 0.25


@pytest.mark.req("KO-10")
def test_a_block_that_has_left_the_kv_cache_is_still_in_the_tier() -> None:
    world = World(1)
    world.stored(0, (), "memory")
    world.stored(0, CHAIN[:8])
    world.stored(0, CHAIN[:8], "memory")
    world.removed(0, CHAIN[:8])
    assert world.found() == 8 and world.state.slates.of(MODEL, ASKED, 0.0).resident[0] == 8 * SIZE * (1 - PRIOR_COSTS["memory"])
    world.removed(0, CHAIN[4:8], "memory")
    assert world.found() == 4


def test_a_prefix_may_lie_here_and_there() -> None:
    world = World(1)
    world.stored(0, (), "memory")
    world.stored(0, (), "disk")
    world.stored(0, CHAIN[:2] + CHAIN[4:6])
    world.stored(0, CHAIN[2:4] + CHAIN[6:7], "memory")
    world.stored(0, CHAIN[7:9], "disk")
    slate = world.state.slates.of(MODEL, ASKED, 0.0)
    saved = 2 + (1 - PRIOR_COSTS["memory"]) * 5 + (1 - PRIOR_COSTS["disk"]) * 2
    assert slate.found[0] == 9 * SIZE and slate.resident[0] == pytest.approx(saved * SIZE)


def test_the_end_of_a_request_is_held_against_all_that_was_found() -> None:
    world = World(1)
    world.stored(0, CHAIN[:60], "memory")
    choice = world.pick()
    world.state.routed(MODEL, ASKED, choice.key, choice.resident_tokens, 0.0)
    finished = RequestFinished("1", "stop", prompt_tokens=100 * SIZE + 1, cached_tokens=60 * SIZE, output_tokens=1)
    world.state.event(choice.key, finished, 0.0)
    tally = world.state.beliefs.truth.models[MODEL.id]
    assert (tally.predicted, tally.found, tally.error_sum) == (60 * SIZE, 60 * SIZE, 0)


@pytest.mark.parametrize("end", ["cleared", "lost", "restarted", "gone"])
def test_nothing_of_a_replica_is_left(end: str) -> None:
    world = World(2)
    for at in range(2):
        world.stored(at, CHAIN[:9], "memory")
    match end:
        case "cleared":
            world.state.event(world.key(0), AllBlocksCleared(), 0.0)
        case "lost":
            world.state.events_lost(world.key(0))
        case "restarted":
            world.state.restarted(world.key(0))
        case _:
            world.update(world.replicas[1:])
            world.update(world.replicas)
    assert (world.found(0), world.found(1)) == (0, 9)
    world.stored(0, CHAIN[:3], "memory")
    assert (world.found(0), world.found(1)) == (3, 9)
    world.update([])
    assert not list(world.state.tiers.indexes()) and not world.state.tiers._held


def test_one_replica_cannot_fill_the_gateways_memory() -> None:
    world = World(1)
    tiers = Tiers(world.state.residency, ResidencyIndex, per_replica=10)
    for blocks in (CHAIN[:7], CHAIN[7:20], CHAIN[20:30]):
        tiers.stored(world.key(0), blocks, "memory")
    ((_, index),) = tiers.indexes()
    assert index.blocks(world.key(0)) == 10
    tiers.removed(world.key(0), CHAIN[:7], "memory")
    tiers.stored(world.key(0), CHAIN[20:30], "memory")
    assert index.longest_prefix(CHAIN[20:30]) == {world.key(0): 7}


@given(
    st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.integers(0, 5), st.integers(1, 3), st.integers(0, 3)), max_size=40)
)
def test_found_is_the_longest_chain_of_what_any_medium_holds(events: list[tuple[int, bool, int, int, int]]) -> None:
    world, held = World(2), defaultdict[tuple[int, Medium | None], set[bytes]](set)
    for at in range(2):
        for medium in MEDIA:
            world.stored(at, (), medium)
    for at, stores, first, count, place in events:
        medium = (None, *MEDIA)[place]
        blocks = CHAIN[first : first + count]
        (world.stored if stores else world.removed)(at, blocks, medium)
        own = held[at, medium]
        held[at, medium] = own.union(blocks) if stores else own.difference(blocks)
    slate = world.state.slates.of(MODEL, ASKED, 0.0)
    for at in range(2):
        depths, within = [], set[bytes]()
        for medium in (None, *MEDIA):
            within |= held[at, medium]
            depths.append(next(depth for depth, block in enumerate(CHAIN) if block not in within))
        assert slate.found[at] == depths[-1] * SIZE
        saved = [
            depth * (1 - PRIOR_COSTS[medium])
            for medium, depth in zip(MEDIA, (after - before for before, after in pairwise(depths)), strict=True)
        ]
        assert slate.resident[at] == pytest.approx((depths[0] + sum(saved)) * SIZE)
