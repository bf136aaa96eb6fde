"""Engines that say what cannot be: they harm what is known of themselves, and nothing else."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from tokenizing import tokenized

from penstock.api.events import BlockStored, Event, RequestFinished, absurd
from penstock.api.fleet import Engine, Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.extproc.call import ResponseHead, Routed
from penstock.gateway.extproc.stages.respond import Respond
from penstock.gateway.flow.control import DEFAULT_LIMITS
from penstock.gateway.flow.gate import FlowGate
from penstock.gateway.http.metrics import PickerMetrics
from penstock.gateway.load import follower, poller
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.load.poller import LoadPoller
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.load.replica_client import ReplicaClient
from penstock.gateway.load.traits import FOREIGN_SEED
from penstock.gateway.load.vllm_events import VllmWire
from penstock.gateway.models.served import ServedNames
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.state import FleetState
from penstock.http.replica_answers import body_of

NESTED = b"[" * 20_000
GOOD = LoadReport(epoch=1, seq=1, num_requests_running=2)
PAGES: list[tuple[Engine, str, bytes]] = [
    ("penstock", "/load", b'{"type":"LoadReport","epoch":1,"seq":1,"lora_running":{"\xff":1}}'),
    ("penstock", "/load", b'{"type":"LoadReport","epoch":1,"seq":1,"other":' + NESTED),
    ("penstock", "/load", b'{"type":"LoadReport","epoch":1,"seq":1,"num_requests_running":-1}'),
    ("penstock", "/load", b'{"type":"LoadReport","epoch":1,"seq":1}' + b" " * 5_000),
    ("vllm", "/metrics", b"vllm:num_requests_running 1e308\n" * 2),
    ("vllm", "/metrics", b"vllm:num_requests_waiting -5\n"),
    ("vllm", "/metrics", b'vllm:cache_config_info{block_size="1e308",num_gpu_blocks="1e308"} 1\n' * 2),
]


async def serving(stack: contextlib.AsyncExitStack, answer: Callable[[str], bytes]) -> int:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=answer(request.path))

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner.addresses[0][1]


def state_of(engine: Engine, port: int) -> tuple[FleetState, Replica]:
    known: dict[str, Any] = {"uid": "u", "name": "r", "pool": "p", "host": "127.0.0.1", "ready": True}
    replica = Replica(**known, port=port, events_port=0, replay_port=0, engine=engine)
    state = FleetState()
    state.update(Fleet(models=[Model(id="m", served_names=["m"])], pools=[Pool(id="p", model="m")], replicas=[replica]))
    return state, replica


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("engine", "path", "page"), PAGES, ids=range(len(PAGES)))
async def test_the_poller_outlives_any_page(monkeypatch: pytest.MonkeyPatch, engine: Engine, path: str, page: bytes) -> None:
    monkeypatch.setattr(poller, "TICK_S", 0.01)
    monkeypatch.setattr(poller, "MAX_BYTES", 50_000 if b"other" in page else 4_000)
    good = {"/load": msgspec.json.encode(GOOD), "/metrics": b"vllm:num_requests_running 2\n"}[path]
    asked: list[str] = []

    def answer(path: str) -> bytes:
        asked.append(path)
        return page if len(asked) == 1 else good

    async with contextlib.AsyncExitStack() as stack:
        state, replica = state_of(engine, await serving(stack, answer))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        task = asyncio.create_task(LoadPoller(state, lambda key: None, 0.01).run(ReplicaClient(session)))
        await until(lambda: task.done() or state.reports.get(key_of(replica)))
        assert not task.done()
        heard = state.reports.get(key_of(replica))
        assert heard is not None
        assert heard.report.num_requests_running == 2  # nothing of the first page was believed
        assert len(asked) > 1
        task.cancel()


@pytest.mark.parametrize("answer", [b'{"data":[{"id":"\xff"}]}', b'{"other":' + NESTED], ids=["text", "nested"])
async def test_names_and_bundles_may_be_anything(answer: bytes) -> None:
    async with contextlib.AsyncExitStack() as stack:
        state, replica = state_of("penstock", await serving(stack, lambda path: answer))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        names, prompts = ServedNames(state), PromptLibrary(state)
        stack.callback(prompts.close)
        await names._fetch(ReplicaClient(session), replica)
        await prompts._learn(ReplicaClient(session), replica)
        assert not names.known([key_of(replica)])
        assert key_of(replica) in prompts._retry_at


async def test_a_long_answer_is_read_whole_and_an_endless_one_is_not() -> None:
    async with contextlib.AsyncExitStack() as stack:
        port = await serving(stack, lambda path: b"x" * 3_000_000)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.get(f"http://127.0.0.1:{port}/") as response:
            assert len(await body_of(response, 3_000_000)) == 3_000_000
        async with session.get(f"http://127.0.0.1:{port}/") as response:
            with pytest.raises(ValueError, match="more than 1000 bytes"):
                await body_of(response, 1000)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_tokens_per_s": float("nan")},
        {"decode_step_s": float("inf")},
        {"kv_cache_usage_perc": -0.1},
        {"max_num_seqs": 2**60},
        {"num_requests_waiting": {"capacity": -1}},
        {"lora_running": {"a": -1}},
    ],
    ids=str,
)
def test_what_no_replica_can_have_is_not_believed(changes: dict[str, Any]) -> None:
    assert absurd(GOOD) is None
    assert absurd(msgspec.structs.replace(GOOD, **changes))


async def test_absurd_events_and_headers_change_nothing() -> None:
    state, replica = state_of("penstock", 1)
    key = key_of(replica)
    follows = FleetFollower(state)
    told: list[Event] = []
    follows.listeners.append(lambda _, event: told.append(event))
    for event in (
        msgspec.structs.replace(GOOD, prefill_tokens_per_s=float("nan")),
        RequestFinished("r", "stop", 1, 1, -(10**9)),
        RequestFinished("r", "stop", 1, -1, 1),
    ):
        follows.event(key, event)
    assert told == [] and state.reports.get(key) is None
    respond = Respond(state, FlowGate(follows, DEFAULT_LIMITS), PickerMetrics(CollectorRegistry(), state.outcomes))
    booking = state.bookings.book("r", key, 1, 0.0)
    routed = Routed(endpoints=[], pool=None, booking=booking, model="m", name="m", came=0.0)
    head = {":status": "200", "endpoint-load-metrics": "TEXT epoch=1,seq=1,kv_cache_usage_perc=1e308"}
    respond.run(routed, ResponseHead(headers=head, served=None))
    assert state.reports.get(key) is None
    follows.event(key, GOOD)
    assert told == [GOOD]
    await follows.close()


async def test_a_subscriber_that_broke_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    class Breaks:
        def __init__(self, *given: Any) -> None:
            self._sink = given[2]

        async def run(self) -> None:
            begun.append(1)
            self._sink.event(key, BlockStored([b"x" * 32]))
            self._sink.complete(key)
            raise KeyError("unforeseen")

    monkeypatch.setattr(follower, "AFRESH_S", 0.01)
    monkeypatch.setattr(follower, "EventSubscriber", Breaks)
    state, replica = state_of("penstock", 1)
    key = key_of(replica)
    replica = msgspec.structs.replace(replica, events_port=1)
    follows = FleetFollower(state)
    follows.update(msgspec.structs.replace(state.directory.fleet, replicas=[replica]))
    await until(lambda: len(begun) > 1)
    await follows.close()
    assert state.residency.blocks(key) == 0  # what it knew is not believed any more


def stored(**changes: Any) -> dict[str, Any]:
    known = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    return {**known, **changes}


@pytest.mark.parametrize(
    "event",
    [
        stored(block_hashes=[[1]]),
        stored(parent_block_hash=[1]),
        stored(extra_keys=5),
        stored(extra_keys=[5]),
        stored(kv_cache_spec_kind=5, group_idx=0),
        stored(group_idx=[1]),
        stored(lora_name=7),
        stored(block_size=2**40),
        {"type": "BlockRemoved", "block_hashes": [{"a": 1}]},
        {"type": "BlockRemoved", "block_hashes": [1], "group_idx": [0]},
    ],
    ids=str,
)
def test_types_that_no_event_has_are_an_error_of_the_value(event: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        VllmWire(FOREIGN_SEED).decode(msgspec.msgpack.encode([0.0, [event], 0]))


@pytest.mark.parametrize("token", [-1, 2**40, None, 1.5])
def test_tokens_that_are_none_leave_their_block_out(token: Any) -> None:
    wire = VllmWire(FOREIGN_SEED)
    batch = wire.decode(msgspec.msgpack.encode([0.0, [stored(token_ids=[1, token])], 0]))
    assert [event for native in batch.blocks for event in wire.translate(native)] == []


async def test_a_prompt_too_deep_to_be_written_is_guessed() -> None:
    state, replica = state_of("vllm", 1)
    prompts = PromptLibrary(state)
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    raw = b"x" * 1000
    for padded in (raw, raw * 10):  # at once, and in a thread
        found = await tokenized(prompts, [replica], {"prompt": deep}, raw=padded)
        assert found.unknown is not None and found.prompts[0].tokens == len(padded) // 4 + 1
    prompts.close()


async def test_hundreds_of_small_prompts_are_no_work_for_the_event_loop() -> None:
    state, replica = state_of("vllm", 1)
    prompts = PromptLibrary(state)
    for prompt, threads in ((["a"] * 900, 1), ([[1]] * 900, 1), ([1] * 900, 0), (["a"] * 16, 0)):
        prompts._pool.shutdown()
        prompts._pool = ThreadPoolExecutor(1)
        await tokenized(prompts, [replica], {"prompt": prompt})
        assert len(prompts._pool._threads) == threads
    prompts.close()
