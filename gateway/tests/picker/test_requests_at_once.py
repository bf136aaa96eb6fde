"""Usual requests, which the package decides in one call, against the stages of the director: the same history in, the same
outcomes out, and the same is known afterwards."""

import asyncio
import gc
import random
import time
import uuid
import weakref
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compiled_texts import LLAMA3, byte_level

from penstock.api import headers
from penstock.api.events import BlockStored, RequestFinished
from penstock.api.fleet import Adapter, Canary, Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway import process
from penstock.gateway.extproc.call import Call, Refused, Routed
from penstock.gateway.load.compiled_hasher import CompiledMemo
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.compiled import MODULE, installed
from penstock.gateway.process import Gateway, GatewaySettings
from penstock.gateway.xds.listener import ListenerSettings
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import ExtraKeys
from penstock.prompt.processor import CHANGES_CHATS, CHAT_PATH, PromptProcessor

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")
BUNDLE = PromptBundle(
    served_names=("m",), tokenizer=byte_level(LLAMA3).to_str(), special_tokens={}, block_size=4, hash_seed="penstock",
    chat_template="{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}", max_model_len=10_000,
)  # fmt: skip
MODELS = [
    Model(id="b/m", served_names=["m", "alias"], hold_timeout_s=0.0),
    Model(id="b/old", served_names=["old"], hold_timeout_s=0.0),
    Model(id="b/new", served_names=["new"], hold_timeout_s=0.0, canary=Canary(of="b/old", weight=50)),
    Model(id="b/free", served_names=["free"], policy="LeastRequests", hold_timeout_s=0.0),
]
ADAPTERS = [Adapter(id="b/a", model="b/m", served_names=["adapter"])]
WORDS = ["the", "river,", "don't", "I'LL", "2024", "état", "вода", "水车。河", "🙂", "</b>", "<|end|>", '"data:', "\n\n", "  "]


class Clock:
    """Monotonic seconds, as a history says them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Still:
    """Discovery of nothing."""

    async def watch(self) -> Any:
        yield Fleet()


class Side:
    """A gateway that decides with `AtOnce` or without it."""

    def __init__(self, *, at_once: bool) -> None:
        listener = ListenerSettings(host="127.0.0.1", port=1)
        settings = GatewaySettings(name="g", host="127.0.0.1", grpc_port=0, http_port=0, listener=listener)
        with pytest.MonkeyPatch.context() as patch:
            if not at_once:
                patch.setattr(process, "AtOnce", lambda *_, **__: None)
            self.gateway = Gateway(settings, Still())
        self.state = self.gateway._follower.state
        self.director = self.gateway._extproc.director
        self.decided_at_once = 0
        compiled = installed()
        assert compiled is not None
        other = msgspec.structs.replace(BUNDLE, block_size=8)
        self.memos = [CompiledMemo(PromptProcessor(bundle), compiled) for bundle in (BUNDLE, other)]

    def know(self, spaces: list[list[ReplicaKey]], silent: list[ReplicaKey]) -> None:
        """In which hash spaces replicas are, and which say nothing of theirs."""
        groups = [(memo, frozenset(keys)) for memo, keys in zip(self.memos, spaces, strict=False)], frozenset(silent)
        self.gateway._prompts.spaces = lambda _: groups  # type: ignore[method-assign] - nobody is there to ask

    async def decide(self, fields: dict[str, str], body: bytes) -> object:
        """What becomes of a request."""
        if self.director.at_once is not None and (routed := self.director.at_once(fields, body)) is not None:
            self.decided_at_once += 1
            return self._said(routed)
        call = Call(headers=fields, body=body)
        try:
            self.director.preview(call)
            outcome = await self.director.route(call)
        except Refused as refused:
            self.director.refused(call, refused)
            return refused.status, refused.reason, str(refused), refused.model
        return self._said(outcome) if isinstance(outcome, Routed) else outcome

    def _said(self, routed: Routed) -> object:
        self.director.passed_on(routed)
        assert routed.choice is not None
        booking, notes = routed.booking, routed.notes[1:]
        said = (
            routed.usual,
            notes,
            routed.endpoints,
            routed.pool,
            routed.finishes,
            routed.sets,
            routed.removes,
            routed.body,
            routed.request_id,
        )
        its = booking.key, booking.prefill_tokens, booking.transfer_tokens, booking.left, booking.made_at, booking.state
        return said, its, routed.came, routed.decided, routed.adapter, routed.explanation

    def known(self) -> object:
        """What is known afterwards."""
        state, gate = self.state, self.gateway._gate
        keys = list(state.directory.replicas)
        lanes = {name: (lane.credits, lane.transit, lane.good_until) for name, lane in gate._lanes.items()}
        paces = {name: lane.forecast.pace.rate(2000.0) for name, lane in gate._lanes.items()}
        columns = {name: (its._arrived, its.table.tolist()) for name, its in state._places.answering.items()}
        awaited = {key: (it.ends, it.prediction) for key, it in state.beliefs.truth._awaited.items()}
        booked = [state.bookings.outstanding(key) for key in keys], len(state._coming)
        return lanes, paces, columns, awaited, booked, state.slates._turns, len(self.gateway._underway), self._decisions()

    def _decisions(self) -> list[object]:
        last = self.gateway._http._decisions.last(3)
        return [msgspec.structs.replace(it, time=0.0) for it in last]


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.choice((0, 1, 5, 40, 300, 1500))))


CHATS = [[{"role": "user", "content": text(random.Random(n))}] for n in range(4)]
"""What is asked more than once."""


def chat(rng: random.Random) -> Any:
    odd = [None, [], "text", [{"role": "user"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}], {"a": 1},
           [{"role": "nobody", "content": "x"}], [{"role": "user", "content": "x", "name": "n"}], [["user", "x"]]]  # fmt: skip
    if rng.random() < 0.5:
        return rng.choice(odd if rng.random() < 0.1 else CHATS)
    return [{"role": rng.choice(("system", "user", "assistant")), "content": text(rng)} for _ in range(rng.choice((1, 1, 2, 5)))]


def body(rng: random.Random) -> bytes:
    numbers = [None, 0, 1, 1, 7, -1, "5", 1.0, True, 2**63, [1]]
    fields: dict[str, Any] = {"model": rng.choice(["m"] * 9 + ["alias", "adapter", "old", "new", "free", "nothing", "", 3, None])}
    fields["messages"] = chat(rng)
    if rng.random() < 0.5:
        return orjson.dumps(fields | {"max_tokens": 9, "stream": True, "temperature": 0.5})
    for name in ("max_tokens", "max_completion_tokens", "n", "best_of", "priority"):
        if rng.random() < 0.1:
            fields[name] = rng.choice(numbers)
    for name, value in (("stream", True), ("cache_salt", "salt"), ("prompt", [1] * 40), ("temperature", 0.5)):
        if rng.random() < 0.1:
            fields[name] = value
    if rng.random() < 0.05:
        fields[rng.choice(sorted(CHANGES_CHATS))] = rng.choice((None, True, [], {}))
    if rng.random() < 0.05:
        del fields[rng.choice(sorted(fields))]
    raw = orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS)
    if rng.random() < 0.05:
        return rng.choice(
            (b"", b"[]", b"{", b"nan", raw[:-1], raw + b"x", raw.replace(b"the", b"\\ud800"), b'{"model":"m",' + raw[1:])
        )
    return raw


def head(rng: random.Random, number: int, size: int) -> dict[str, str]:
    fields = {":method": "POST", ":path": CHAT_PATH, headers.REQUEST_ID: f"r-{rng.choice((number, number, 0))}"}
    odd = [
        (":method", "GET"), (":path", "/v1/completions"), (":path", "/v1/models"), (":path", CHAT_PATH + "?a=1"), (":path", "/"),
        (headers.REQUEST_ID, ""), (headers.REQUEST_ID, "\ufffd"), (headers.DECISION, "explain"), (headers.DECISION, "no"),
        (headers.TIMEOUT, "5"), (headers.TIMEOUT, "never"), ("content-encoding", "gzip"), ("content-encoding", "identity"),
        ("content-length", "9" * 8), ("content-length", "9" * 30), ("content-length", "many"), ("authorization", "Bearer k"),
    ]  # fmt: skip
    fields["content-length"] = str(size)
    if rng.random() < 0.15:
        name, value = rng.choice(odd)
        fields[name] = value
    return fields


def fleet(rng: random.Random) -> Fleet:
    """Of six replicas of `m` and three of each of the other models, some are there; they are of two pools at times."""
    replicas, pools = list[Replica](), [Pool(id=f"{model.id}/p", model=model.id) for model in MODELS]
    pools.append(Pool(id="b/m/q", model="b/m"))
    ranks = rng.random() < 0.2
    for model in MODELS:
        for n in range(6 if model.id == "b/m" else 3):
            pool = f"{model.id}/{'q' if model.id == 'b/m' and n == 5 and rng.random() < 0.1 else 'p'}"
            if rng.random() < 0.9:
                replicas.append(
                    Replica(uid=f"{model.id}-{n}", name=f"{model.id}-{n}", pool=pool, host=f"10.0.{len(model.id)}.{n}", port=8000,
                            events_port=rng.choice((1, 1, 0)), replay_port=1, ready=rng.random() < 0.9, rank=0 if ranks else None)
                )  # fmt: skip
    return Fleet(models=MODELS, adapters=ADAPTERS, pools=pools, replicas=replicas)


def happens(rng: random.Random, number: int, sides: list[Side], clock: Clock) -> None:
    """Something that is no request: the fleet changes, tokenizers become known or are lost, replicas say something or fail."""
    keys = sorted(sides[0].state.directory.replicas) or [ReplicaKey("gone", 1)]
    key, kind, there, odd = rng.choice(keys), rng.randrange(8), fleet(rng), rng.random()
    keys, asked, medium = rng.sample(keys, len(keys)), rng.choice(CHATS), "memory" if rng.random() < 0.01 else None
    report = LoadReport(
        epoch=1, seq=number, max_num_seqs=8, num_requests_running=8 if odd < 0.1 else int(odd * 6),
        prefill_tokens_per_s=1000.0, decode_step_s=rng.choice((0.0, 0.01, 0.03)),
    )  # fmt: skip
    ended = RequestFinished(
        request_id=f"r-{number - 1}", reason="stop", prompt_tokens=9, cached_tokens=4, output_tokens=3, ttft_s=0.1
    )
    for side in sides:
        match kind:
            case 0 if odd < 0.2:
                side.state.update(there)
            case 1 if odd < 0.4:
                half = len(keys) // 2
                side.know(*((([keys], []), ([keys[half:], keys[:half]], []), ([], []), ([keys[1:]], keys[:1]))[int(odd * 10)]))
            case 1:
                side.know([keys], [])
            case 2:
                side.state.event(key, ended, clock.now)
            case 3 if odd < 0.03:
                side.state.unreachable(key, clock.now)
            case 3:
                side.state.answered(key, clock.now, error=False)
            case 4:
                [prompt] = side.memos[0].hashed(CHAT_PATH, {"messages": asked}, ExtraKeys())
                side.state.event(key, BlockStored(list(prompt.block_hashes), medium), clock.now)
            case _:
                side.state.reported(key, report, clock.now)
    clock.now += rng.choice((0.0, 0.001, 0.06, 0.3))


def lived(seed: int, requests: int) -> list[Side]:
    """Two gateways after the same history, during which they have said and known the same."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
        return _lived(seed, requests, clock)


def _lived(seed: int, requests: int, clock: Clock) -> list[Side]:
    rng, sides = random.Random(seed), [Side(at_once=False), Side(at_once=True)]
    first = fleet(rng)
    for side in sides:
        side.state.update(first)
        side.know([list(side.state.directory.replicas)], [])

    async def live() -> None:
        for number in range(1, requests):
            for _ in range(rng.choice((0, 1, 1, 4))):
                happens(rng, number, sides, clock)
            raw = body(rng)
            fields = head(rng, number, len(raw))
            said = [await side.decide(dict(fields), raw) for side in sides]
            assert said[0] == said[1], (fields, raw)
            known = [side.known() for side in sides]
            assert known[0] == known[1], (fields, raw)

    asyncio.run(live())
    for side in sides:
        side.gateway._prompts.close()
    return sides


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_a_history_goes_the_same_with_requests_decided_at_once(seed: int) -> None:
    lived(seed, 60)


def test_much_of_a_history_is_decided_at_once() -> None:
    stages, at_once = lived(2, 400)
    assert stages.decided_at_once == 0
    assert at_once.decided_at_once > 50


def test_who_decides_at_once_is_collected() -> None:
    side = Side(at_once=True)
    decides = weakref.ref(side.director.at_once.__self__)  # type: ignore[union-attr]
    assert decides() is not None
    side.gateway._prompts.close()
    del side
    gc.collect()
    assert decides() is None
