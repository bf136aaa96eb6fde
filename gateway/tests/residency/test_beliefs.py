"""Predicted residency and how true it is, with an engine whose cache is a simulated LRU."""

import logging
import random
from collections import OrderedDict

import pytest

from penstock.api.events import AllBlocksCleared, BlockStored, RequestFinished
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.gateway.load.traits import Traits
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState
from penstock.gateway.residency import history
from penstock.gateway.residency.index import Knowledge
from penstock.gateway.residency.truth import KEPT, Prediction, Truth

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

MODEL = Model(id="ns/m", served_names=["m"])
SIZE = 16


class Lru:
    """An engine's cache of `room` blocks."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def run(self, hashes: tuple[bytes, ...]) -> int:
        """The leading blocks that were cached."""
        hit = next((at for at, block in enumerate(hashes) if block not in self.blocks), len(hashes))
        for block in hashes:
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.room:
            self.blocks.popitem(last=False)
        return hit


def replica(**changes: object) -> Replica:
    known = {"uid": "u", "name": "r", "pool": "p", "host": "h", "port": 1, "events_port": 0, "replay_port": 0, "ready": True}
    return Replica(**{**known, "engine": "vllm", **changes})  # type: ignore[arg-type]


def fleet(*replicas: Replica) -> FleetState:
    state = FleetState()
    state.update(Fleet(models=[MODEL], pools=[Pool(id="p", model="ns/m")], replicas=list(replicas)))
    return state


class World:
    """Conversations that come back, at one replica that tells nothing but its answers' cached tokens."""

    def __init__(self, room: int, *, says: int = 0, conversations: int = 60) -> None:
        self.replica = replica()
        self.key = key_of(self.replica)
        self.state = fleet(self.replica)
        self.engine = Lru(room)
        if says:
            self.state.learned(self.key, Traits(engine="vllm", num_blocks=says))
        self.chance = random.Random(1)
        self.lengths = [0] * conversations
        self.turns = 0

    def turn(self) -> tuple[int, int]:
        """One request; the blocks that were predicted and those that were found."""
        which = min(int(self.chance.expovariate(0.08)), len(self.lengths) - 1)
        self.lengths[which] = self.lengths[which] + 4 if self.lengths[which] < 60 else 4
        hashes = tuple(f"{which}-{n}".encode().ljust(32) for n in range(self.lengths[which]))
        request = RequestView(id=f"r{self.turns}", path="", model="m", prompts=(Prompt(len(hashes) * SIZE + 1, hashes),))
        self.turns += 1
        predicted = int(self.state.slates.of(MODEL, request, 0.0).resident[0])
        self.state.routed(MODEL, request, self.key, predicted, float(self.turns))
        found = self.engine.run(hashes)
        end = RequestFinished(request.id, "stop", request.prompt_tokens, found * SIZE, 5)
        self.state.event(self.key, end, 0.0)
        return predicted // SIZE, found

    def error(self, turns: int) -> float:
        """Mean error over some turns, as a share of what was found or predicted."""
        seen = [self.turn() for _ in range(turns)]
        return sum(abs(a - b) for a, b in seen) / max(sum(max(a, b) for a, b in seen), 1)


@pytest.mark.parametrize("room", [150, 400, 900])
def test_an_unknown_room_is_found_by_what_answers_say(room: int) -> None:
    world = World(room)
    first = world.error(150)
    world.error(2000)
    last = world.error(500)
    assert last < 0.12
    assert last < first or first < 0.02
    assert world.state.residency.knowledge(world.key) is Knowledge.PREDICTED
    assert world.state.residency.blocks(world.key) <= 1.3 * room


def test_a_room_that_the_engine_states_is_right_from_the_first() -> None:
    world = World(400, says=400)
    assert world.error(1500) < 0.03
    assert world.state.beliefs.history.room(world.key) <= 400


def test_what_has_had_no_request_for_long_is_forgotten() -> None:
    world = World(400)
    world.error(50)
    world.state.beliefs.history.expire(50.0)
    assert world.state.residency.blocks(world.key)
    world.state.beliefs.history.expire(51.0 + history.IDLE_S)
    assert world.state.residency.blocks(world.key) == 0


@pytest.mark.req("RT-10")
def test_a_replica_that_tells_is_never_predicted() -> None:
    telling = replica(events_port=5, engine="penstock")
    state, key = fleet(telling), key_of(telling)
    request = RequestView(id="r", path="", model="m", prompts=(Prompt(33, (b"a", b"b")),))
    state.routed(MODEL, request, key, 0, 0.0)
    assert state.residency.blocks(key) == 0
    state.event(key, BlockStored([b"a", b"b"]), 0.0)
    assert state.slates.of(MODEL, request, 0.0).resident[0] == 32
    state.event(key, AllBlocksCleared(), 0.0)
    assert state.slates.of(MODEL, request, 0.0).resident[0] == 0


# --- predicted against true ---

KEY = ReplicaKey("u", 1)


def end(name: str, prompt: int, cached: int, output: int = 3) -> RequestFinished:
    return RequestFinished(name, "stop", prompt, cached, output)


def test_errors_are_counted_by_model() -> None:
    truth = Truth()
    for name, predicted, found in (("a", 100, 100), ("b", 100, 98), ("c", 100, 0)):
        truth.expect(KEY, name, Prediction("m", 100, predicted, SIZE, True))
        assert truth.finished(KEY, end(name, 100, found), Knowledge.EXACT) is not None
    tally = truth.models["m"]
    assert (tally.predicted, tally.found, tally.miscounted) == (300, 198, 0)
    assert tally.buckets == [1, 0, 1, 0, 0, 0, 1, 0]
    assert truth.finished(KEY, end("a", 100, 100), Knowledge.EXACT) is None  # known no more
    truth.expect(KEY, "d", Prediction("m", 100, 100, SIZE, True))
    assert truth.finished(KEY, end("d", 100, 0, output=0), Knowledge.EXACT) is None  # it never ran
    assert sum(tally.buckets) == 3


def test_ends_that_never_come_are_bounded() -> None:
    truth = Truth()
    for n in range(KEPT + 10):
        truth.expect(KEY, str(n), Prediction("m", 100, 0, SIZE, True))
    assert truth.finished(KEY, end("0", 100, 0), Knowledge.EXACT) is None
    assert truth.finished(KEY, end(str(KEPT + 9), 100, 0), Knowledge.EXACT) is not None


@pytest.mark.parametrize(
    ("knowledge", "prompt", "says"),
    [
        (Knowledge.EXACT, 120, "its tokenizer or chat template"),
        (Knowledge.EXACT, 100, "its events are late"),
        (Knowledge.PARTIAL, 100, "its events were lost"),
        (Knowledge.PREDICTED, 100, "it sends no events"),
    ],
)
def test_a_rising_mismatch_is_told_once_with_its_cause(
    caplog: pytest.LogCaptureFixture, knowledge: Knowledge, prompt: int, says: str
) -> None:
    truth = Truth()

    def run(count: int, found: int, counted: int) -> None:
        for n in range(count):
            truth.expect(KEY, str(n), Prediction("m", 100, 64, SIZE, True))
            truth.finished(KEY, end(str(n), counted, found), knowledge)

    with caplog.at_level(logging.WARNING):
        run(100, 64, 100)
        assert not caplog.records
        run(100, 0, prompt)
        assert len(caplog.records) == 1
        assert says in caplog.text
        run(200, 64, 100)
        run(100, 0, prompt)
        assert len(caplog.records) == 2


def test_several_answers_of_one_request_are_not_compared() -> None:
    state = fleet(replica())
    request = RequestView(id="r", path="", model="m", prompts=(Prompt(33, (b"a", b"b")),), answers=2)
    state.routed(MODEL, request, KEY, 0, 0.0)
    state.event(KEY, end("r", 33, 32), 0.0)
    assert not state.beliefs.truth.models


def test_of_requests_under_one_id_at_once_none_is_compared() -> None:
    truth = Truth()
    truth.expect(KEY, "same", Prediction("m", 100, 100, SIZE, True))
    truth.expect(KEY, "same", Prediction("m", 5_000, 0, SIZE, True))
    assert truth.finished(KEY, end("same", 100, 100), Knowledge.EXACT) is None
    assert truth.awaits(KEY, "same")
    assert truth.finished(KEY, end("same", 5_000, 0), Knowledge.EXACT) is None
    assert not truth.awaits(KEY, "same")
    truth.expect(KEY, "same", Prediction("m", 100, 100, SIZE, True))
    assert truth.finished(KEY, end("same", 100, 100), Knowledge.EXACT) is not None, "one after the other they are"


def test_a_second_request_of_several_answers_under_the_same_id_lends_its_ends_to_nobody() -> None:
    state = fleet(replica())
    for answers in (1, 2):
        request = RequestView(id="r", path="", model="m", prompts=(Prompt(33, (b"a", b"b")),), answers=answers)
        state.routed(MODEL, request, KEY, 0, 0.0)
    for _ in range(3):
        state.event(KEY, end("r", 33, 32), 0.0)
    assert not state.beliefs.truth.models
