"""Equal prompts at once: the second knows of the first one's prefill."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from picks import NOW, report

from penstock.api.events import BlockStored, RequestFinished
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.gateway.picker.bookings import Booking
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.choice import choose
from penstock.gateway.picker.coming import Coming
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

MODEL = Model(id="d/m", served_names=["m"])
KEYS = [ReplicaKey(f"u{number}", 8000) for number in range(8)]
SIZE = 16


def fleet(count: int = 8) -> FleetState:
    state = FleetState()
    members = [
        Replica(uid=key.uid, name=key.uid, pool="d/m/p", host=f"10.0.0.{at}", port=8000, events_port=1, replay_port=2, ready=True)
        for at, key in enumerate(KEYS[:count])
    ]
    state.update(Fleet(models=[MODEL], pools=[Pool(id="d/m/p", model="d/m")], replicas=members))
    for key in KEYS[:count]:
        state.reported(key, report(prefill_tokens_per_s=10_000.0, kv_blocks_total=20_000, kv_blocks_reclaimable=20_000), NOW)
    return state


def asks(name: str, blocks: tuple[int, ...]) -> RequestView:
    """A prompt of one block for each number; a block's hash holds those before it."""
    hashes = tuple(repr(blocks[: at + 1]).encode() for at in range(len(blocks)))
    return RequestView(id=name, path="", model="m", prompts=(Prompt(len(blocks) * SIZE + 1, hashes),), block_size=SIZE)


def resident(state: FleetState, request: RequestView) -> list[int]:
    return [int(tokens) // SIZE for tokens in state.slates.of(MODEL, request, NOW).resident]


def send(state: FleetState, request: RequestView) -> tuple[Booking, int]:
    choice = choose(state.slates.of(MODEL, request, NOW), "Cost")
    return state.book(request, choice.key, choice.resident_tokens, NOW), request.prompt_tokens - choice.resident_tokens


def test_a_hundred_equal_prompts_at_once_are_neither_computed_everywhere_nor_all_at_one_replica() -> None:
    state, blocks = fleet(), tuple(range(100))
    sent = [send(state, asks(f"r{number}", blocks + (1000 + number,) * 8)) for number in range(100)]
    places = {booking.key for booking, _ in sent}
    whole = sum(fresh > 100 * SIZE for _, fresh in sent)
    assert 1 < len(places) == whole  # computed once at each
    counts = [sum(booking.key == key for booking, _ in sent) for key in places]
    assert max(counts) < 60


def test_the_second_of_two_equal_prompts_follows_the_first() -> None:
    state, blocks = fleet(), tuple(range(100))
    first, computed = send(state, asks("a", blocks))
    second, rest = send(state, asks("b", blocks))
    assert second.key == first.key
    assert (computed, rest) == (100 * SIZE + 1, 1)


prompts = st.lists(st.integers(0, 2), max_size=6).map(tuple)


@given(st.lists(st.tuples(prompts, st.integers(0, 2)), max_size=12), prompts, st.booleans())
def test_what_is_coming_is_the_longest_common_prefix_until_the_bookings_end(
    sent: list[tuple[tuple[int, ...], int]], asked: tuple[int, ...], stored: bool
) -> None:
    state, bookings, at = fleet(3), [], []
    for number, (blocks, where) in enumerate(sent):
        request = asks(f"r{number}", blocks)
        bookings.append(state.book(request, KEYS[where], resident(state, request)[where] * SIZE, NOW))
        at.append((blocks, where))
    expected = [max((common(asked, blocks) for blocks, place in at if place == where), default=0) for where in range(3)]
    request = asks("asked", asked)
    assert resident(state, request) == expected
    for (blocks, where), booking in zip(at, bookings, strict=True):
        if stored:
            state.event(KEYS[where], BlockStored(list(asks("", blocks).prompts[0].block_hashes)), NOW)
        state.event(KEYS[where], RequestFinished(booking.request_id, "stop", 1, 0, 1), NOW)
    assert resident(state, request) == (expected if stored else [0, 0, 0])
    assert len(state._coming) == 0
    if isinstance(state._coming, Coming):  # the compiled one shows no more
        assert not state._coming._by_first and not state._coming._depths


def test_what_is_coming_follows_a_request_that_another_replica_took() -> None:
    state, request = fleet(2), asks("a", (1, 2, 3))
    booking = state.book(request, KEYS[0], 0, NOW)
    state.bookings.move(booking, KEYS[1])
    assert resident(state, request) == [0, 3]
    state.restarted(KEYS[1])
    assert resident(state, request) == [0, 0]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_pick_among_open_equal_prompts_costs_the_same_however_many_there_are() -> None:
    """A prompt of whole blocks computes its last one whatever is cached: all equal ones begin with the same block."""
    state = fleet()
    blocks = tuple(range(32))
    hashes = asks("any", blocks).prompts[0].block_hashes

    def whole(name: str) -> RequestView:
        return RequestView(id=name, path="", model="m", prompts=(Prompt(32 * SIZE, hashes),), block_size=SIZE)

    sent = [send(state, whole(f"r{number}"))[0] for number in range(400)]
    rows = {key: row for row, key in enumerate(KEYS)}
    compared = state._coming.found(whole("last").prompts[0], SIZE, rows, None)  # each with what is asked
    assert 1 <= len(compared) <= 2 * len(KEYS)
    for booking in sent:
        state.bookings.release(booking, "stream")
    assert resident(state, whole("after")) == [0] * len(KEYS)


def test_a_prompt_under_way_follows_its_request_to_another_replica() -> None:
    state = fleet()
    booking, _ = send(state, asks("a", tuple(range(50))))
    other = next(key for key in KEYS if key != booking.key)
    state.bookings.move(booking, other)
    assert [bool(blocks) for blocks in resident(state, asks("b", tuple(range(50))))] == [key == other for key in KEYS]
    state.bookings.release(booking, "stream")
    assert not any(resident(state, asks("c", tuple(range(50)))))
