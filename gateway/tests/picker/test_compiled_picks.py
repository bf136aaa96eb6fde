"""The compiled parts against Python's: the same history in, the same picks out, to the last bit."""

import random
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.api import headers
from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, RequestFinished
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport, encode
from penstock.gateway.extproc.call import ResponseHead, Routed
from penstock.gateway.extproc.stages.respond import Respond
from penstock.gateway.extproc.underway import Underway
from penstock.gateway.flow.control import DEFAULT_LIMITS
from penstock.gateway.flow.gate import FlowGate
from penstock.gateway.http.metrics import PickerMetrics
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.load.own_reports import OwnReports
from penstock.gateway.picker.bookings import EXPIRY_S, State
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.choice import Choice
from penstock.gateway.picker.compiled import MODULE, Compiled, index_of, installed
from penstock.gateway.picker.figures import Figures, Rates
from penstock.gateway.picker.folded import common, folding
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState
from penstock.gateway.picker.usual import told
from penstock.gateway.residency.index import ResidencyIndex

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")
COMPILED = installed()
MODEL = Model(id="b/m", served_names=["m"])
BLOCK = 16
TREE = [[random.Random(branch * 100 + depth).randbytes(32) for depth in range(12)] for branch in range(4)]
"""Hashes of four prompts, which share their first blocks by pairs."""
AT_ONCE = ("policy", "replica", "endpoints", "resident_tokens", "scores", "next_best", "ttft_s", "hop")
"""What a choice says without being put together."""
for pair in (0, 2):
    TREE[pair + 1][:5] = TREE[pair][:5]


def packed(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The same names as the compiled parts keep them."""
    assert COMPILED is not None
    return COMPILED.BlockHashes(b"".join(hashes))


def figures_of(rng: random.Random, rows: int) -> np.ndarray:
    """float64 [figures, rows], with the odd values that figures have."""
    odd = {
        "heard_at": (-np.inf, 1000.0, 998.5, 990.0, 400.0),
        "rows_free": (np.inf, 0.0, 5.0),
        "blocks_free": (np.inf, 0.0, 700.0),
        "kv_usage": (0.0, 0.3, 0.9, 0.97),
        "correction": (1.0, 0.5, 3.7),
        "s_per_token": (5e-4, 1e-3 / 3),
        "step_s": (0.03, 0.011),
    }
    usual = (0.0, 0.0, 1.0, 7.0, 1234.5)
    return np.array([[rng.choice(odd.get(name, usual)) for _ in range(rows)] for name in Figures._fields])


@given(st.integers(0, 10**9), st.sampled_from((1, 2, 15, 40)), st.sampled_from((1, 16, 64)))
def test_prices_fold_to_the_same_numbers(seed: int, rows: int, block_size: int) -> None:
    rng = random.Random(seed)
    common = Rates(*(rng.uniform(1e-3, 100.0) for _ in Rates.__struct_fields__))
    figures, seeds, open = figures_of(rng, rows), np.zeros(rows, np.uint64), np.ones(rows, np.bool_)
    both = [folding(compiled, figures, seeds, open, {}) for compiled in (None, COMPILED)]
    for changed in (3, 12, 0):  # all of them, some, many and none
        one, other = (folded.table(common, block_size, 1000.0) for folded in both)
        assert one.tolist() == other.tolist()
        for row in rng.sample(range(rows), min(rows, changed)):
            figures[:, row] = figures_of(rng, 1)[:, 0]
            for folded in both:
                folded.mark(row)


class World:
    """A fleet that lives through a history by lot."""

    def __init__(self, seed: int, state: FleetState) -> None:
        self.state, self._rng, self.now = state, random.Random(seed), 100.0
        self._pools = [f"b/m/p{n}" for n in range(self._rng.choice((1, 1, 3)))]
        self._count, self._seq = self._rng.choice((1, 2, 3, 15, 40, 130)), 0
        self._gone: set[int] = set()
        self._booked: list[Any] = []
        self._reports = OwnReports(state.compiled)
        self._metrics = PickerMetrics(CollectorRegistry(), state.outcomes)
        self._respond = Respond(state, FlowGate(FleetFollower(state), DEFAULT_LIMITS), self._metrics)
        self._underway = Underway(state.bookings, state.reports)
        self._heads = self._respond.usual_heads(self._underway, lambda: self.now)
        self.ended: list[tuple[str, ReplicaKey, str]] = []
        self.moved: list[tuple[str, ReplicaKey]] = []
        self.answers: list[ReplicaKey | None] = []
        state.bookings.ended.append(lambda it, by: self.ended.append((it.request_id, it.key, by)))
        state.bookings.moved.append(lambda it: self.moved.append((it.request_id, it.key)))
        self._update()

    def _update(self) -> None:
        replicas = [
            Replica(uid=f"u{n}", name=f"r{n}", pool=self._pools[n % len(self._pools)], host=f"10.0.0.{n}", port=8000,
                    events_port=int(n % 7 != 5), replay_port=1, ready=n == 0 or n % 11 > 0)
            for n in range(self._count) if n not in self._gone
        ]  # fmt: skip
        pools = [Pool(id=pool, model=MODEL.id) for pool in self._pools]
        self.state.update(Fleet(models=[MODEL], pools=pools, replicas=replicas))

    def _key(self) -> ReplicaKey:
        return ReplicaKey(f"u{self._rng.randrange(self._count)}", 8000)

    def step(self) -> Choice:
        """Something happens, and then a request is picked for."""
        rng, state = self._rng, self.state
        self.now += rng.choice((0.0, 0.0, 0.01, 0.3, 3.0))
        for _ in range(rng.randrange(5)):
            self._happen()
        hashes = tuple(rng.choice(TREE)[: rng.randrange(13)])
        images = ((rng.randrange(200), rng.randrange(9000)),) * rng.choice((0, 0, 1))
        names = hashes if rng.random() < 0.5 else packed(hashes)
        prompts = (Prompt(len(hashes) * BLOCK + rng.randrange(BLOCK), names, images),) * rng.choice((1, 1, 1, 2))
        asked = RequestView(
            id=f"q{rng.randrange(50)}", path="", model="m", prompts=prompts, block_size=BLOCK,
            max_tokens=rng.choice((None, 1, 100)), adapter=rng.choice((None, None, None, "a")),
        )  # fmt: skip
        # What only some can compare, and an excluded one.
        among = None if rng.random() < 0.8 else frozenset(self._key() for _ in range(3))
        excluded = [self._key()] if self._count > 1 and rng.random() < 0.1 else ()
        choice = chosen(state, MODEL, asked, self.now, comparable=among, excluded=excluded)
        if choice is None:
            asked = msgspec.structs.replace(asked, adapter=None)
            choice = chosen(state, MODEL, asked, self.now, comparable=among)
        assert choice is not None
        answers = rng.choice((1, 1, 3))
        if excluded:
            self._booked.append(state.book(asked, choice.key, choice.resident_tokens, self.now, answers=answers))
            return choice
        sent = state.send(MODEL, asked, self.now, comparable=among, answers=answers)
        assert sent is not None and sent.booking.key == choice.key
        self._booked.append(sent.booking)
        whole = told(sent.choice)
        assert [getattr(sent.choice, name) for name in AT_ONCE] == [getattr(whole, name) for name in AT_ONCE]
        return whole

    def bookings(self) -> tuple[object, ...]:
        """All that is known of the bookings and of reports; those of several replicas end in any order."""
        bookings, keys = self.state.bookings, [ReplicaKey(f"u{n}", 8000) for n in range(self._count)]
        counts = [[bookings.count(key, state) for state in State] for key in keys]
        told = [(it.key, it.state, it.left, it.awaited, it.responded_at, it.unanswered) for it in self._booked]
        totals, outstanding = [bookings.total(state) for state in State], [bookings.outstanding(key) for key in keys]
        reports = [heard and (heard.report, heard.at) for heard in map(self.state.reports.get, keys)]
        coming = len(self.state._coming)
        ends = dict(bookings.released), sorted(self.ended), self.moved
        return counts, totals, outstanding, told, ends, coming, reports, self._underway.unwatched

    def _report(self, epoch: int, seq: int) -> LoadReport:
        rng = self._rng
        return LoadReport(
            epoch=epoch, seq=seq, num_requests_running=rng.randrange(20),
            num_requests_waiting=rng.choice(({}, {}, {"capacity": 3})),
            max_num_seqs=rng.choice((0, 16, 64)), kv_cache_usage_perc=rng.choice((0.0, 0.5, 0.97)),
            kv_blocks_total=rng.choice((0, 1000)), kv_blocks_reclaimable=rng.randrange(900),
            prefill_backlog_tokens=rng.choice((0, 0, 5000)), prefill_tokens_per_s=rng.choice((0.0, 1000.0, 3000.0)),
            decode_step_s=rng.choice((0.0, 0.01, 0.02)), lora_slots=rng.choice((0, 0, 2)),
            lora_running=rng.choice(({}, {}, {"a": 1})), transfer_s=rng.choice((0.0, 0.0, 0.02)),
        )  # fmt: skip

    def _answer(self, booking: Any) -> None:
        """The head of a response comes, usual or not."""
        rng, state = self._rng, self.state
        replica = self.state.directory.replicas.get(rng.choice((booking.key, booking.key, booking.key, self._key())))
        served = rng.choice(
            (replica and replica.endpoint,) * 8 + (None, "", "10.0.0.200:8000", f" {replica and replica.endpoint}")
        )
        fields = {":status": rng.choice(("200", "200", "200", "200", "204", "2", "404", "503"))}
        kinds = (
            "application/json",
            "text/event-stream",
            "text/event-stream; charset=utf-8",
            "TEXT/EVENT-STREAM",
            "text/html",
            None,
        )
        if kind := rng.choice(kinds):
            fields["content-type"] = kind
        self._seq += 1
        report = self._report(rng.choice((1,) * 12 + (2,)), self._seq - rng.choice((0, 0, 0, 3)))
        match rng.choice(("text", "text", "text", "text", "none", "json", "wrong", "binary")):
            case "text":
                fields[headers.LOAD] = encode(report, "TEXT")
            case "json":
                fields[headers.LOAD] = encode(report, "JSON")
            case "wrong":
                fields[headers.LOAD] = encode(report, "TEXT") + ", named_metrics.more=1"
            case "binary":
                fields |= {headers.LOAD: encode(self._report(1, 1), "TEXT"), headers.LOAD_BIN: encode(report, "BIN")[4:]}
            case _:
                pass
        prefill = state.bookings.book("p", booking.key, 1, self.now) if rng.random() < 0.1 else None
        routed = Routed(
            endpoints=[], pool=None, booking=booking, model=MODEL.id, name="m", came=self.now - 0.5, named=f"b-{self._seq}",
            prefill_booking=prefill,
        )  # fmt: skip
        assert routed.named is not None
        self._underway.add(routed.named, routed)
        self._underway.passed_on(routed)
        name, key = rng.choice((routed.named, routed.named, "b-unknown")), booking.key
        if self._heads is None or not self._heads.take_in({headers.BOOKING: name}, fields, served):
            known = self._underway.responded(name)
            head = ResponseHead(headers=fields, served=served)
            key = None if known is None else self._respond.take_in(known, head, self.now)
        self.answers.append(key)

    def counted(self) -> list[Any]:
        """What is told of answers."""
        return [
            self.answers,
            [family.samples for family in self._metrics.collect()],
            self.state.outcomes.view(self.state.directory.names),
        ]

    def _happen(self) -> None:
        rng, state, key = self._rng, self.state, self._key()
        kinds = (
            "report",
            "report",
            "event",
            "event",
            "end",
            "end",
            "answered",
            "answered",
            "answered",
            "moved",
            "finished",
            "trouble",
            "left",
            "lost",
            "rare",
        )
        match rng.choice(kinds):
            case "report":
                self._seq += 1
                report = self._report(1, self._seq)
                said = report if rng.random() < 0.3 else self._reports.read(encode(report, "TEXT"))
                state.reported(key, said, self.now, in_header=said is not report)
            case "event":
                stored = rng.choice(TREE)[: rng.randrange(13)]
                kinds = (BlockStored(stored), BlockStored(stored), BlockRemoved(stored[3:]), AllBlocksCleared())
                state.event(key, rng.choice(kinds), self.now)
            case "end" if self._booked:
                booking = self._booked.pop(rng.randrange(len(self._booked)))
                if rng.random() < 0.5:
                    state.bookings.responded(booking, (1, self._seq), self.now)
                else:
                    state.bookings.release(booking, "answered")
            case "answered" if self._booked:
                self._answer(rng.choice(self._booked))
            case "moved" if self._booked:
                state.bookings.move(rng.choice(self._booked), key)
            case "finished" if self._booked:
                booking = rng.choice(self._booked)
                state.event(booking.key, RequestFinished(booking.request_id, "stop", 40, 16, rng.randrange(9)), self.now)
            case "rare" if rng.random() < 0.3:
                match rng.choice(("restarted", "expired", "included")):
                    case "restarted":
                        state.restarted(key)
                    case "expired":
                        state.bookings.expire(self.now + EXPIRY_S - rng.choice((0.0, 3.0)))
                    case _ if self._booked:
                        state.bookings.included(rng.choice(self._booked))
            case "trouble" if rng.random() < 0.2:
                state.unreachable(key, self.now)
            case "left" if rng.random() < 0.2:
                self._gone.symmetric_difference_update({rng.randrange(1, self._count)} if self._count > 1 else set())
                self._update()
            case "lost":
                state.events_lost(key)


def chosen(state: FleetState, *asked: Any, **among: Any) -> Choice | None:
    made = state.picks.of(*asked, **among)
    return None if made is None else told(made[0])


def seen(choice: Choice) -> tuple[object, ...]:
    """All that a choice decides, says and shows."""
    figures = choice.table.tolist()
    return choice.key, choice.rows, choice.scores, choice.limit, choice.ttft_s, choice.endpoints, figures, choice.reasons


@given(st.integers(0, 10**9))
@settings(max_examples=40)
def test_the_same_history_has_the_same_picks(seed: int) -> None:
    worlds = World(seed, FleetState(400)), World(seed, FleetState(400, compiled=COMPILED))
    for _ in range(25):
        one, other = (seen(world.step()) for world in worlds)
        assert one == other
        assert worlds[0].bookings() == worlds[1].bookings()
        assert worlds[0].counted() == worlds[1].counted()
    first, second = (world.state.residency for world in worlds)
    assert isinstance(first, ResidencyIndex) and not isinstance(second, ResidencyIndex)
    assert (first.entries, first.dropped, len(first)) == (second.entries, second.dropped, len(second))


def test_usual_picks_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_steps(*_: object, **__: object) -> Choice:
        raise NotImplementedError

    monkeypatch.setattr("penstock.gateway.picker.picks.choose", no_steps)
    state, asked = FleetState(compiled=COMPILED), RequestView(id="q", path="", model="m", prompts=(Prompt(40),))
    replicas = [
        Replica(uid=f"u{n}", name="r", pool="b/m/p", host=f"10.0.0.{n}", port=8000, events_port=1, replay_port=1, ready=n > 0)
        for n in range(3)
    ]
    state.update(Fleet(models=[MODEL], pools=[Pool(id="b/m/p", model=MODEL.id)], replicas=replicas))
    monkeypatch.setattr(state, "book", no_steps)
    choice, sent = chosen(state, MODEL, asked, 0.0), state.send(MODEL, asked, 0.0)
    assert choice is not None and sorted(choice.rows) == [1, 2]
    assert sent is not None and sent.booking.key == choice.key and state.bookings.total(State.PENDING) == 1
    images = Prompt(40, images=((1, 1),))
    for prompts in ((Prompt(40),) * 2, (images,)):
        with pytest.raises(NotImplementedError):
            state.picks.of(MODEL, msgspec.structs.replace(asked, prompts=prompts), 0.0)
    assert state.picks.of(MODEL, msgspec.structs.replace(asked, adapter="a"), 0.0) is None, "nobody has the adapter"
    with pytest.raises(NotImplementedError):
        state.picks.of(msgspec.structs.replace(MODEL, policy="LeastRequest"), asked, 0.0)
    with pytest.raises(NotImplementedError):
        state.picks.of(MODEL, asked, 0.0, excluded=[ReplicaKey("u1", 8000)])


@pytest.mark.parametrize("streams", [True, False])
def test_usual_responses_are_one_call(monkeypatch: pytest.MonkeyPatch, *, streams: bool) -> None:
    def no_steps(*_: object) -> ReplicaKey:
        raise NotImplementedError

    monkeypatch.setattr(Respond, "_uncommon", no_steps)
    state = FleetState(compiled=COMPILED)
    metrics = PickerMetrics(CollectorRegistry(), state.outcomes)
    respond = Respond(state, FlowGate(FleetFollower(state), DEFAULT_LIMITS), metrics)
    ranks = [
        Replica(uid=f"u{n}", name="r", pool="p", host="10.0.0.1", port=8000 + n, events_port=1, replay_port=1, ready=True)
        for n in range(2)
    ]
    ranks += [
        Replica(uid="u2", name="r", pool="p", host="10.0.0.2", port=8000, rank=n, events_port=1, replay_port=1, ready=True)
        for n in range(2)
    ]
    state.update(Fleet(models=[MODEL], pools=[Pool(id="p", model=MODEL.id)], replicas=ranks))
    kind = "text/event-stream" if streams else "application/json"

    def answered(key: ReplicaKey, served: str | None, **fields: str) -> Any:
        booking = state.bookings.book("r", key, 1, 0.0)
        routed = Routed(endpoints=[], pool=None, booking=booking, model=MODEL.id, name="m", came=0.0)
        found = {":status": "200", "content-type": kind, **{name.replace("_", "-"): value for name, value in fields.items()}}
        assert respond.take_in(routed, ResponseHead(headers=found, served=served), 1.0) == key
        return booking

    key, address = ReplicaKey("u0", 8000), "10.0.0.1:8000"
    assert answered(key, address).state is (State.UNREPORTED if streams else State.RELEASED)
    load = encode(LoadReport(epoch=1, seq=2, num_requests_running=3), "TEXT")
    with pytest.raises(NotImplementedError):  # the first report of a replica
        answered(key, address, endpoint_load_metrics=load)
    state.reported(key, LoadReport(epoch=1, seq=1), 0.5)
    answered(key, address, endpoint_load_metrics=load)
    heard = state.reports.get(key)
    assert heard is not None and heard.report.num_requests_running == 3 and heard.at == 1.0
    other_process, reordered = encode(LoadReport(epoch=2, seq=1), "TEXT"), load.replace("TEXT ", "TEXT cpu=1, ")
    for uncommon in (other_process, reordered):
        with pytest.raises(NotImplementedError):
            answered(key, address, endpoint_load_metrics=uncommon)
    for served in (None, "10.0.0.1:8001", "10.0.0.9:8000"):
        with pytest.raises(NotImplementedError):
            answered(key, served)
    for fields in ({":status": "500"}, {"content_type": "text/html"}, {"endpoint_load_metrics_bin": ""}):
        with pytest.raises(NotImplementedError):
            answered(key, address, **fields)
    with pytest.raises(NotImplementedError):  # which of its ranks has answered the address does not say
        answered(ReplicaKey("u2", 8000, 0), "10.0.0.2:8000")
    state.unreachable(ReplicaKey("u1", 8001), 0.0)
    with pytest.raises(NotImplementedError):
        answered(key, address)


def test_usual_heads_are_one_call_and_others_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = FleetState(compiled=COMPILED)
    respond = Respond(state, FlowGate(FleetFollower(state), DEFAULT_LIMITS), PickerMetrics(CollectorRegistry(), state.outcomes))
    underway = Underway(state.bookings, state.reports)
    heads = respond.usual_heads(underway, lambda: 7.0)
    assert heads is not None
    replicas = [
        Replica(uid=f"u{n}", name="r", pool="p", host=f"10.0.0.{n}", port=8000,
                events_port=1, replay_port=1, ready=True, engine=engine)
        for n, engine in enumerate(("penstock", "vllm"))
    ]  # fmt: skip
    state.update(Fleet(models=[MODEL], pools=[Pool(id="p", model=MODEL.id)], replicas=replicas))

    def no_steps(*_: object) -> bool | None:
        raise NotImplementedError

    monkeypatch.setattr(respond, "take_in", no_steps)
    monkeypatch.setattr(underway, "responded", no_steps)

    def asked(name: str, uid: str = "u0", *, prefilled: bool = False) -> Any:
        booking, prefill = (state.bookings.book(name, ReplicaKey(uid, 8000), 1, 0.0) for _ in range(2))
        routed = Routed(endpoints=[], pool=None, booking=booking, model=MODEL.id, name="m", came=0.0, named=name)
        routed.prefill_booking = prefill if prefilled else None
        underway.add(name, routed)
        underway.passed_on(routed)
        return booking

    good = {":status": "200", "content-type": "text/event-stream"}
    first, foreign, pair = asked("a"), asked("b", "u1"), asked("c", prefilled=True)
    for name, fields, served in (
        ("z", good, "10.0.0.0:8000"),
        ("a", good | {":status": "503"}, "10.0.0.0:8000"),
        ("a", good, "10.0.0.1:8000"),
        ("b", good, "10.0.0.1:8000"),
        ("c", good, "10.0.0.0:8000"),
    ):
        assert not heads.take_in({headers.BOOKING: name}, fields, served)
    assert not heads.take_in({}, good, "10.0.0.0:8000")
    assert underway.unwatched == {"a", "b", "c"} and {it.state for it in (first, foreign, pair)} == {State.PENDING}
    assert heads.take_in({headers.BOOKING: "a"}, good, "10.0.0.0:8000")
    assert (first.state, first.responded_at, underway.unwatched) == (State.UNREPORTED, 7.0, {"b", "c"})
    (outcome,) = state.outcomes.view(state.directory.names)
    assert (outcome.requests, sum(outcome.ttft_counts)) == (1, 1)


@pytest.mark.parametrize("compiled", [None, COMPILED])
def test_a_decision_is_told_as_it_was_made(compiled: Compiled | None) -> None:
    def fleet(*ready: bool) -> Fleet:
        rows = enumerate(ready)
        replicas = [
            Replica(
                uid=f"u{n}", name=f"r{n}", pool="b/m/p", host=f"10.0.0.{n}", port=8000, events_port=1, replay_port=1, ready=it
            )
            for n, it in rows
        ]
        return Fleet(models=[MODEL], pools=[Pool(id="b/m/p", model=MODEL.id)], replicas=replicas)

    def all_of(choice: Choice) -> tuple[object, ...]:
        return seen(choice), choice.ranked, choice.rejected, choice.next_best, choice.whole.endpoints, choice.whole.last_resorts

    state, asked = FleetState(compiled=compiled), RequestView(id="q", path="", model="m", prompts=(Prompt(40),))
    state.update(fleet(False, True, True))
    choice = chosen(state, MODEL, asked, 0.0)
    assert choice is not None
    before = all_of(choice)
    assert [it.name for it in choice.rejected] == ["r0"]
    state.unreachable(choice.key, 1.0)
    state.reported(choice.key, LoadReport(epoch=1, seq=1, num_requests_running=9, max_num_seqs=9, decode_step_s=0.5), 1.0)
    state.update(fleet(True, True, False, True, True))
    assert all_of(choice) == before
    later = chosen(state, MODEL, asked, 2.0)
    assert later is not None
    assert all_of(later) != before


def test_another_hash_than_ours_is_a_name_too() -> None:
    key, short, long = ReplicaKey("u", 1), b"x", b"y" * 40
    index = index_of(COMPILED)
    index.store(key, [short, long])
    assert index.holds(key, short) and index.holds(key, long) and not index.holds(key, b"y" * 32)
    assert index.longest_prefix([short, long, b""]) == {key: 2}


def test_what_is_no_block_or_no_array_is_refused() -> None:
    assert COMPILED is not None
    index, key = index_of(COMPILED), ReplicaKey("u", 1)
    with pytest.raises(TypeError, match="a block's hash must be bytes"):
        index.store(key, cast("list[bytes]", [b"a" * 32, "text"]))
    assert not index.blocks(key), "nothing of it was taken"
    table, folded = np.zeros((30, 3)), np.zeros((12, 3))
    seeds = np.zeros(3, np.uint64)
    with pytest.raises(ValueError, match=r"a table of 30 columns has the shape \[29, 3\]"):
        COMPILED.Folded(table[1:], seeds, folded, [1] * 3, {}, 8, common)
    with pytest.raises(ValueError, match="an array has not 3 rows"):
        COMPILED.Folded(table, seeds, folded, [1] * 2, {}, 8, common)
    folded.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        COMPILED.Folded(table, seeds, folded, [1] * 3, {}, 8, common)
    with pytest.raises(ValueError, match="not 3 rows"):
        none = None
        COMPILED.rank(folded, table, np.zeros(2), 1, 1, np.zeros(3, np.uint64), 1, 0.02, 10, none, none, none, none)


def test_packed_names_are_those_that_were_packed() -> None:
    names, key = TREE[0], ReplicaKey("u", 1)
    assert packed(names) == tuple(names) and tuple(names) == packed(names) and not packed(())
    assert packed(names) != tuple(names[:3]) and packed(names) != (*names[:-1], b"x" * 32)
    assert (len(packed(names)), packed(names)[2], packed(names)[-1], list(packed(names))) == (12, names[2], names[-1], names)
    for at in (12, -13):
        with pytest.raises(IndexError, match=f"there is no block {at}"):
            packed(names)[at]
    with pytest.raises(ValueError, match="33 bytes are no whole names"):
        packed([b"x" * 33])
    index = index_of(COMPILED)
    index.store(key, packed(names[:5]))
    assert index.longest_prefix(packed(names)) == {key: 5}


def test_a_package_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(f"{MODULE}.FIGURES", ["pool"])
    assert installed() is None
    assert "is of another version" in caplog.text


def test_bounds_and_rows_are_those_of_replicas() -> None:
    index, key = index_of(COMPILED, per_replica=2, total=3), ReplicaKey("u", 7)
    assert index.limit(key) == 2
    index.store(key, [bytes([n]) * 32 for n in range(3)])
    assert (index.blocks(key), index.dropped) == (2, 1)
    assert index.rows_by_bit({key: 5}) == [5]
