"""Prefill and decode replicas are chosen as pairs, and the hop is left out where it does not pay."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import headers
from penstock.api.fleet import Fleet, Model, Pool, Replica, Role
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.choice import Choice, choose
from penstock.gateway.picker.cost import HORIZON_TOKENS
from penstock.gateway.picker.disaggregation import RECOMPUTE_TOKENS
from penstock.gateway.picker.policies import POLICIES
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState

MODEL = Model(id="ns/m", served_names=["m"])
ROLES: dict[str, Role] = {"p": "Prefill", "d": "Decode", "b": "Both"}
NOW = 100.0


def replica(name: str, **changes: Any) -> Replica:
    """`p1`, `d1`, `b1`: of the pool of prefill, of decode replicas, or of those that do both."""
    at = ord(name[0]) * 256 + int(name[1:])
    known: dict[str, Any] = {
        "uid": name, "name": name, "pool": f"ns/m/{name[0]}", "host": f"10.0.{at // 256}.{at % 256}", "port": 80,
        "events_port": 1, "replay_port": 2, "ready": True, "kv_layout": "same",
    }  # fmt: skip
    return Replica(**{**known, **changes})


def fleet(*replicas: Replica) -> FleetState:
    state = FleetState()
    pools = [Pool(id=f"ns/m/{letter}", model=MODEL.id, role=role) for letter, role in ROLES.items()]
    state.update(Fleet(models=[MODEL], pools=pools, replicas=list(replicas)))
    for it in replicas:
        report(state, it.name)
    return state


def report(state: FleetState, name: str, **figures: Any) -> None:
    known: dict[str, Any] = {"epoch": 1, "seq": 1, "max_num_seqs": 64, "kv_blocks_total": 10_000, "kv_blocks_reclaimable": 10_000}
    known |= {"prefill_tokens_per_s": 10_000.0, "decode_step_s": 0.02, "num_requests_running": 30}
    key = next(key for key, it in state.directory.replicas.items() if it.name == name)
    state.reported(key, LoadReport(**{**known, **figures}), NOW)


def pick(
    state: FleetState,
    tokens: int = 4_000,
    policy: str = "Cost",
    id: str = "r",
    hashes: tuple[bytes, ...] = (),
    later_s: float = 0.0,
) -> Choice:
    request, now = RequestView(id=id, path="", model="m", prompts=(Prompt(tokens, hashes),)), NOW + later_s
    return choose(state.slates.of(MODEL, request, now), policy, prefill=state.slates.of_prefill(MODEL, request, now))


@pytest.mark.req("RT-34", "RT-14")
def test_a_long_prompt_is_computed_elsewhere_and_answered_by_a_decode_replica() -> None:
    choice = pick(fleet(replica("p1"), replica("d1")))
    assert choice.replica.name == "d1"
    assert choice.hop is not None
    assert choice.hop.replica.name == "p1"
    assert choice.hop.fresh_tokens == 4_000
    assert choice.endpoints == ["10.0.100.1:80"]  # never a prefill replica
    assert "p1 computes the prompt: 0.4 s and 0.025 s of transfer against 0.787 s at d1" in choice.reasons


def test_a_transfer_costs_what_the_decode_replica_has_measured_and_forgets() -> None:
    state = fleet(replica("p1"), replica("d1"), replica("d2"))
    assert pick(state).hop is not None
    report(state, "d1", seq=2, transfer_s=0.1, transfer_s_per_token=250e-6)
    report(state, "d2", seq=2, transfer_s=0.1, transfer_s_per_token=62.5e-6)
    choice = pick(state)
    assert choice.replica.name == "d2"
    assert "p1 computes the prompt: 0.4 s and 0.35 s of transfer against 0.787 s at d2" in choice.reasons
    report(state, "d2", seq=3, transfer_s=0.1, transfer_s_per_token=125e-6)
    assert pick(state).hop is None
    report(state, "d2", seq=4)
    assert "p1 computes the prompt: 0.4 s and 0.025 s of transfer against 0.787 s at d2" in pick(state).reasons


@pytest.mark.req("RT-37", "PD-27")
@pytest.mark.parametrize(("resident", "hop"), [(0, True), (3_904, True), (3_952, False)])
def test_little_to_compute_is_computed_where_it_is_decoded(resident: int, hop: bool) -> None:
    state = fleet(replica("p1"), replica("d1"))
    report(state, "d1", prefill_tokens_per_s=1_000.0, prefill_backlog_tokens=5_000)
    blocks = tuple(bytes([n // 256, n % 256]) for n in range(250))
    state.residency.store(key_of(replica("d1")), blocks[: resident // 16])
    choice = pick(state, hashes=blocks)
    assert (choice.hop is not None) == hop
    if not hop:
        assert f"d1 computes the prompt itself: only {4_000 - resident} tokens are to be computed" in choice.reasons
    assert (4_000 - resident >= RECOMPUTE_TOKENS) == hop


@pytest.mark.req("RT-37")
def test_no_hop_where_prefill_replicas_are_busier() -> None:
    state = fleet(replica("p1"), replica("d1"))
    report(state, "p1", prefill_backlog_tokens=20_000)
    choice = pick(state)
    assert choice.hop is None
    assert "d1 computes the prompt itself: a prefill elsewhere would take 2.42 s, here it takes 0.787 s" in choice.reasons


@pytest.mark.req("RT-35")
@pytest.mark.parametrize(
    "full", [{"num_requests_running": 64}, {"num_requests_waiting": {"capacity": 40}}, {"kv_blocks_reclaimable": 200}]
)
def test_never_a_prefill_whose_decode_has_no_room(full: dict[str, Any]) -> None:
    state = fleet(replica("p1"), replica("d1"))
    report(state, "d1", **full)
    choice = pick(state)
    assert choice.hop is None
    assert "d1 computes the prompt itself: there is no room yet for a transferred prompt" in choice.reasons


@pytest.mark.req("RT-35")
@pytest.mark.parametrize(
    ("figures", "room"),
    [
        ({"kv_blocks_reclaimable": 266}, True),  # 4,000 tokens of prompt and 256 of answer, in blocks of 16
        ({"kv_blocks_reclaimable": 265}, False),
        ({"num_requests_running": 63}, True),
        ({"num_requests_running": 62, "num_requests_waiting": {"capacity": 2}}, False),
        ({"num_requests_running": 62, "num_requests_waiting": {"capacity": 1}}, True),
    ],
)
def test_the_last_row_and_the_last_block_are_room(figures: dict[str, Any], room: bool) -> None:
    state = fleet(replica("p1"), replica("d1"))
    report(state, "d1", **figures)
    assert (pick(state).hop is not None) == room


@pytest.mark.req("RT-35")
def test_transfers_on_their_way_take_room() -> None:
    state = fleet(replica("p1"), replica("d1"))
    report(state, "d1", kv_blocks_reclaimable=600)
    assert pick(state).hop is not None
    state.bookings.book("other", key_of(replica("d1")), 0, NOW, transfer_tokens=6_000)
    assert pick(state).hop is None
    assert pick(fleet(replica("p1"), replica("d1"), replica("d2")), id="x").hop is not None


@pytest.mark.req("PD-31")
def test_blocks_travel_only_between_equal_layouts() -> None:
    for theirs in ("other", ""):
        state = fleet(replica("p1", kv_layout=theirs), replica("d1"))
        assert pick(state).hop is None
    assert pick(fleet(replica("p1", kv_layout=""), replica("d1", kv_layout=""))).hop is None
    mixed = fleet(replica("p1", kv_layout="old"), replica("p2", kv_layout="new"), replica("d1", kv_layout="new"))
    hop = pick(mixed).hop
    assert hop is not None
    assert hop.replica.name == "p2"


def test_the_fallbacks_can_read_the_same_blocks() -> None:
    decoders = [replica(f"d{n}", kv_layout="old" if n % 2 else "new") for n in range(1, 5)]
    choice = pick(fleet(replica("p1", kv_layout="old"), *decoders))
    assert choice.hop is not None
    assert sorted(choice.endpoints) == ["10.0.100.1:80", "10.0.100.3:80"]


def test_the_pair_is_chosen_at_once() -> None:
    """The least busy decode replica is passed over where its only prefill replica is busy."""
    state = fleet(
        *(replica("p1", kv_layout="a"), replica("p2", kv_layout="b"), replica("d1", kv_layout="a"), replica("d2", kv_layout="b"))
    )
    report(state, "p1", prefill_backlog_tokens=50_000)
    report(state, "d1", num_requests_running=28)
    choice = pick(state)
    assert choice.replica.name == "d2"
    assert choice.hop is not None
    assert choice.hop.replica.name == "p2"


def test_the_cache_of_a_prefill_replica_counts() -> None:
    state = fleet(replica("p1"), replica("p2"), replica("d1"))
    blocks = tuple(bytes([n // 256, n % 256]) for n in range(250))
    state.residency.store(key_of(replica("p2")), blocks[:100])
    hop = pick(state, hashes=blocks).hop
    assert hop is not None
    assert (hop.replica.name, hop.fresh_tokens) == ("p2", 4_000 - 1_600)


@pytest.mark.req("RT-36")
def test_a_full_prefill_replica_passes_and_a_full_decode_replica_stays_full() -> None:
    """KV memory of a prefill is free again in a moment; a decode replica's is not."""
    state = fleet(replica("p1"), replica("d1"), replica("d2"))
    nearly: dict[str, Any] = {"kv_cache_usage_perc": 0.99, "kv_blocks_reclaimable": 5_000}
    report(state, "p1", **nearly)
    assert pick(state).hop is not None
    report(state, "d1", **nearly)
    assert {pick(state, id=str(n)).replica.name for n in range(20)} == {"d2"}


def test_replicas_that_do_both_answer_beside_pairs() -> None:
    state = fleet(replica("p1"), replica("d1"), replica("b1"))
    report(state, "d1", num_requests_running=64)
    choice = pick(state)
    assert choice.replica.name == "b1"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_takes_the_hop(policy: str) -> None:
    assert pick(fleet(replica("p1"), replica("d1")), policy=policy).hop is not None


def test_without_a_prefill_replica_the_terms_are_the_plain_ones() -> None:
    state = fleet(replica("d1"), replica("p1", ready=False))
    choice = pick(state)
    assert choice.hop is None
    assert choice.joint is None


def test_the_terms_of_a_pair_add_up_to_its_score() -> None:
    entry = pick(fleet(replica("p1"), replica("d1"))).ranked[0]
    terms = {name: value for name, value in entry.terms.items() if name not in ("itl_s", "ttft_s")}
    assert math.isclose(sum(terms.values()) + HORIZON_TOKENS * entry.terms["itl_s"], entry.score)


@pytest.mark.req("RT-37")
def test_who_would_wait_behind_a_prefill_speaks_for_the_hop_and_not_against_its_decode_replica() -> None:
    idle, busy = (fleet(replica("p1"), replica("d1"), replica("d2")) for _ in range(2))
    for state in (idle, busy):
        report(state, "p1", prefill_backlog_tokens=20_000)
    assert pick(idle, later_s=1.0).hop is None
    pick(busy)
    for at in range(50):  # answered where they were computed, and gone
        asked = RequestView(id=str(at), path="", model="m", prompts=(Prompt(20),))
        busy.bookings.release(busy.book(asked, key_of(replica("d1")), 0, NOW), "finished")
    choice = pick(busy, later_s=1.0)
    assert choice.hop is not None
    entry = choice.ranked[0]
    terms = {name: value for name, value in entry.terms.items() if name not in ("itl_s", "ttft_s")}
    assert terms["crowding_s"] == 0
    assert math.isclose(sum(terms.values()) + HORIZON_TOKENS * entry.terms["itl_s"], entry.score)


def test_a_pair_counts_among_the_arrivals_at_both() -> None:
    state = fleet(replica("p1"), replica("d1"))
    asked = RequestView(id="r", path="", model="m", prompts=(Prompt(4_000),))
    slates = (state.slates.of(MODEL, asked, NOW), state.slates.of_prefill(MODEL, asked, NOW))
    assert [it.rates.arrivals for it in slates if it is not None] == [0.0, 0.0]
    state.book_pair(asked, key_of(replica("d1")), 0, (key_of(replica("p1")), 4_000), NOW)
    slates = (state.slates.of(MODEL, asked, NOW + 1), state.slates.of_prefill(MODEL, asked, NOW + 1))
    assert all(it is not None and it.rates.arrivals > 0.1 for it in slates)


LOADS = st.fixed_dictionaries(
    {
        "num_requests_running": st.integers(0, 64),
        "kv_blocks_reclaimable": st.integers(0, 2_000),
        "prefill_backlog_tokens": st.integers(0, 50_000),
        "prefill_tokens_per_s": st.sampled_from([0.0, 500.0, 20_000.0]),
    }
)
Member = tuple[str, str, bool, dict[str, Any]]
MEMBER = st.tuples(st.sampled_from("pdb"), st.sampled_from(["a", "b", ""]), st.booleans(), LOADS)


@given(st.lists(MEMBER, min_size=1, max_size=8), st.integers(1, 8_000), st.sampled_from(sorted(POLICIES)))
def test_pairs_are_sound_whatever_the_fleet(
    members: list[tuple[str, str, bool, dict[str, Any]]], tokens: int, policy: str
) -> None:
    replicas = [replica(f"{letter}{at}", kv_layout=layout, ready=ready) for at, (letter, layout, ready, _) in enumerate(members)]
    state = fleet(*replicas)
    for it, (*_, load) in zip(replicas, members, strict=True):
        report(state, it.name, **load)
    if not any(it.ready and it.name[0] != "p" for it in replicas):
        return
    choice = pick(state, tokens, policy)
    assert choice.replica.ready
    assert choice.replica.name[0] != "p"
    if choice.hop is not None:
        prefill = choice.hop.replica
        assert prefill.name[0] == "p"
        assert prefill.ready
        assert prefill.kv_layout == choice.replica.kv_layout != ""
        assert tokens >= RECOMPUTE_TOKENS
        assert choice.hop.prefill_s + choice.hop.transfer_s < choice.hop.local_s
    again = fleet(*replicas[::-1])
    for it, (*_, load) in zip(replicas, members, strict=True):
        report(again, it.name, **load)
    same = pick(again, tokens, policy)
    assert (same.replica, same.hop and same.hop.replica) == (choice.replica, choice.hop and choice.hop.replica)
    assert msgspec.json.encode(choice.reasons)


async def test_a_pair_on_the_wire_is_booked_at_both_and_freed_at_both(world: Any) -> None:
    prefill, decode = (
        msgspec.structs.replace(it, pool=f"ns/tiny/{name}", kv_layout="same")
        for it, name in zip(world.replicas, "pd", strict=True)
    )
    world.engines[0].report = LoadReport(epoch=1, seq=1, prefill_tokens_per_s=100_000.0)
    world.engines[1].report = LoadReport(epoch=1, seq=1, prefill_tokens_per_s=100.0, num_requests_running=2)
    pools = [Pool(id="ns/tiny/p", model="ns/tiny", role="Prefill"), Pool(id="ns/tiny/d", model="ns/tiny", role="Decode")]
    model = Model(id="ns/tiny", served_names=["tiny"])
    world.discovery.queue.put_nowait(Fleet(models=[model], pools=pools, replicas=[prefill, decode]))
    await world.until(lambda: len(world.gateway._prompts._digests) == 2)
    bookings = world.state.bookings

    def outstanding() -> tuple[int, int, int]:
        return (
            bookings.outstanding(key_of(prefill)).prefill_tokens,
            bookings.outstanding(key_of(decode)).prefill_tokens,
            bookings.outstanding(key_of(decode)).transfer_tokens,
        )

    long = " ".join(f"w{n}" for n in range(100)) + " w1" * 100
    stream = world.stream()
    answer = await stream.ask(world.completion(prompt=long), **{headers.PREFILLER: "6.6.6.6:66"})
    mutation = answer.request_headers.response.header_mutation
    sets = {o.header.key: o.header.raw_value.decode() for o in mutation.set_headers}
    assert (sets[headers.PREFILLER], sets[headers.DESTINATION]) == (prefill.endpoint, decode.endpoint)
    assert headers.PREFILLER not in mutation.remove_headers
    assert outstanding() == (200, 0, 200)
    shown = (await world.get("/debug/decisions?n=1"))[0]
    assert (shown["picked"], shown["prefilled_by"]) == (decode.name, prefill.name)
    await stream.respond(**{"content-type": "text/event-stream"})
    assert outstanding()[0] == 0
    assert bookings.released["prefilled"] == 1
    reset = world.stream()
    await reset.ask(world.completion(prompt=long))
    reset.call.cancel()
    await world.until(lambda: bookings.released["reset"] == 2)
    short = await world.stream().ask(world.completion(prompt="w1 w2"), **{headers.PREFILLER: "6.6.6.6:66"})
    mutation = short.request_headers.response.header_mutation
    assert headers.PREFILLER not in {o.header.key for o in mutation.set_headers}
    assert headers.PREFILLER in mutation.remove_headers  # and a client names no replica
