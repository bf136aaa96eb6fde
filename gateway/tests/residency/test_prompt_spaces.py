"""Which tokenizer a request's prompts go through: of ours, of both revisions of a rollout, of engines of others, of nobody."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizing import tokenized

from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.load import prompts
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.load.replica_client import ReplicaClient
from penstock.gateway.load.tokenized import guessed_tokens
from penstock.gateway.load.traits import Traits
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.state import FleetState
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import BlockHasher, ExtraKeys

WORDS = [f"w{n}" for n in range(64)]
TEXT = " ".join(WORDS)
MODEL = Model(id="ns/m", served_names=["tiny"])


def tokenizer(first: int = 0) -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: first + n for n, word in enumerate(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def bundle(**changes: Any) -> PromptBundle:
    plain = PromptBundle(
        served_names=("tiny",),
        tokenizer=tokenizer().to_str(),
        chat_template=None,
        special_tokens={},
        block_size=16,
        hash_seed="one",
        max_model_len=512,
    )
    return msgspec.structs.replace(plain, **changes)


class Replicas:
    """Small servers of bundles, a replica each, and the library that asks them."""

    def __init__(self, folders: dict[str, Path] | None = None) -> None:
        self.state = FleetState()
        self.library = PromptLibrary(self.state, folders)
        self.replicas: list[Replica] = []
        self.runners: list[web.AppRunner] = []
        self.asked = 0
        self.downloads = 0

    async def add(
        self, served: PromptBundle | None = None, first: Callable[[], Awaitable[None]] | None = None, **changes: Any
    ) -> Replica:
        async def answer(request: web.Request) -> web.Response:
            assert served is not None
            self.asked += 1
            if first is not None:
                await first()
            if served.digest in request.headers.get("if-none-match", ""):
                return web.Response(status=304, headers={"etag": f'"{served.digest}"'})
            self.downloads += 1
            return web.Response(body=served.to_json(), headers={"etag": f'"{served.digest}"'})

        app = web.Application()
        if served is not None:
            app.router.add_get("/prompt-bundle", answer)
        runner = web.AppRunner(app)
        self.runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        name = f"r{len(self.replicas)}"
        port = runner.addresses[0][1]
        known: dict[str, Any] = {"uid": name, "name": name, "pool": "ns/m/p", "host": "127.0.0.1", "port": port}
        replica = Replica(**known | changes, events_port=0, replay_port=0, ready=True)
        self.replicas.append(replica)
        pools = [Pool(id=pool, model="ns/m") for pool in sorted({replica.pool for replica in self.replicas})]
        self.state.update(Fleet(models=[MODEL], pools=pools, replicas=list(self.replicas)))
        return replica

    async def learnt(self, count: int) -> None:
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(self.library.run(ReplicaClient(session)))
            async with asyncio.timeout(60):
                while len(self.library._digests) < count:
                    await asyncio.sleep(0.01)
            task.cancel()

    async def tokenize(self, body: dict[str, Any], tenant: str = "", adapter: str | None = None) -> Any:
        replicas = self.state.directory.replicas_of(MODEL)
        return await tokenized(self.library, replicas, body, tenant=tenant, adapter=adapter)

    async def close(self) -> None:
        self.library.close()
        for runner in self.runners:
            await runner.cleanup()


@pytest.fixture
async def fleet() -> Any:
    fleet = Replicas()
    yield fleet
    await fleet.close()


def hashes(seed: str, first: int = 0, extra: ExtraKeys | None = None) -> tuple[bytes, ...]:
    return tuple(BlockHasher(16, seed).hash(tokenizer(first).encode(TEXT).ids, extra))


@pytest.mark.req("RT-21", "RT-22")
async def test_bundles_that_differ_in_names_alone_are_one_hash_space(fleet: Replicas) -> None:
    one = await fleet.add(bundle())
    other = await fleet.add(bundle(served_names=("renamed",), max_model_len=256))
    await fleet.learnt(2)
    tokens = await fleet.tokenize({"prompt": TEXT})
    assert tokens.comparable == {key_of(one), key_of(other)}
    assert tokens.prompts[0].block_hashes == hashes("one")
    assert not tokens.elsewhere
    assert fleet.library.max_model_len(fleet.replicas) == 256


@pytest.mark.req("RT-22")
async def test_a_rollout_is_scored_in_both_revisions_hash_spaces(fleet: Replicas) -> None:
    old = [await fleet.add(bundle()) for _ in range(2)]
    new = await fleet.add(bundle(hash_seed="two", tokenizer=tokenizer(100).to_str(), block_size=8))
    await fleet.learnt(3)
    tokens = await fleet.tokenize({"prompt": TEXT})
    assert tokens.comparable == {key_of(replica) for replica in old}
    [elsewhere] = tokens.elsewhere
    assert (elsewhere.replicas, elsewhere.block_size) == ({key_of(new)}, 8)
    fleet.state.residency.store(key_of(old[0]), tokens.prompts[0].block_hashes[:2])
    fleet.state.residency.store(key_of(new), elsewhere.prompts[0].block_hashes)
    # In the other's space, a block says nothing.
    fleet.state.residency.store(key_of(old[1]), elsewhere.prompts[0].block_hashes)
    request = RequestView(id="r", path="", model="tiny", prompts=tokens.prompts, elsewhere=tokens.elsewhere)
    slate = fleet.state.slates.of(MODEL, request, 0.0, comparable=tokens.comparable)
    rows = fleet.state._places.answering[MODEL.id].rows
    assert [slate.resident[rows[key_of(r)]] for r in (*old, new)] == [32, 0, 56]  # never the whole prompt


@pytest.mark.req("RT-39")
async def test_tenants_salts_and_adapters_are_kept_apart(fleet: Replicas) -> None:
    await fleet.add(bundle())
    await fleet.learnt(1)
    seen = [
        await fleet.tokenize({"prompt": TEXT}),
        await fleet.tokenize({"prompt": TEXT}, tenant="a"),
        await fleet.tokenize({"prompt": TEXT}, adapter="sql"),
        await fleet.tokenize({"prompt": TEXT, "cache_salt": "s"}),
    ]
    extra = [ExtraKeys(), ExtraKeys(tenant="a"), ExtraKeys(lora="sql"), ExtraKeys(cache_salt="s")]
    assert [tokens.prompts[0].block_hashes for tokens in seen] == [hashes("one", extra=keys) for keys in extra]
    assert len({block for tokens in seen for block in tokens.prompts[0].block_hashes}) == 4 * 4


async def test_an_engine_of_others_is_counted_by_the_tokenizer_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer().to_str())
    fleet = Replicas({"tiny": tmp_path})
    replica = await fleet.add(engine="vllm")
    fleet.state.learned(key_of(replica), Traits(engine="vllm", block_size=32))
    await fleet.learnt(1)
    tokens = await fleet.tokenize({"prompt": TEXT})
    assert (tokens.unknown, tokens.block_size, tokens.prompts[0].tokens) == (None, 32, 64)
    assert tokens.comparable == {key_of(replica)}
    fleet.state.learned(key_of(replica), Traits(engine="vllm", block_size=8))
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        task = asyncio.create_task(fleet.library.run(ReplicaClient(session)))
        while (await fleet.tokenize({"prompt": TEXT})).block_size != 8:
            await asyncio.sleep(0.01)
        task.cancel()
    await fleet.close()


async def test_without_any_tokenizer_bytes_stand_for_tokens(fleet: Replicas) -> None:
    replica = await fleet.add(engine="sglang")
    fleet.state.reported(key_of(replica), LoadReport(epoch=1, seq=1), 0.0)
    first = await fleet.tokenize({"messages": [{"role": "user", "content": TEXT}]})
    longer = await fleet.tokenize({"messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]})
    assert first.comparable == {key_of(replica)}
    assert first.unknown is not None
    known = first.prompts[0].block_hashes
    assert len(known) == len(orjson.dumps([{"role": "user", "content": TEXT}])) // 64
    assert longer.prompts[0].block_hashes[: len(known)] == known


async def test_a_prompt_whose_bytes_take_too_long_is_guessed(fleet: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await fleet.add(engine="sglang")
    fleet.state.reported(key_of(replica), LoadReport(epoch=1, seq=1), 0.0)
    monkeypatch.setattr("penstock.gateway.load.prompts.TOKENIZE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("penstock.gateway.load.prompts.by_bytes", lambda *_: time.sleep(0.2))
    guessed = await fleet.tokenize({"prompt": "x" * 100_000})
    assert guessed.unknown is not None and guessed.prompts[0].tokens > 20_000 and guessed.prompts[0].block_hashes == ()


async def test_a_large_prompt_leaves_the_event_loop_its_turns(fleet: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TOKENIZE_TIMEOUT_S", 60.0)
    await fleet.add(bundle(max_model_len=10**6))
    await fleet.learnt(1)
    body = {"prompt": [n % 64 for n in range(200_000)]}
    task, turns = asyncio.create_task(fleet.tokenize(body)), 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10  # on the loop itself it would be one
    assert (await task).unknown is None


async def test_a_longer_prompt_needs_no_thread_once_most_of_it_is_remembered(
    fleet: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.add(bundle(max_model_len=10_000))
    await fleet.learnt(1)
    handed: list[object] = []
    submit = fleet.library._pool.submit
    monkeypatch.setattr(fleet.library._pool, "submit", lambda job: handed.append(job) or submit(job))
    text = TEXT * (2 * prompts.INLINE_BYTES // len(TEXT))
    first = await fleet.tokenize({"prompt": text})
    assert len(handed) == 1
    again = await fleet.tokenize({"prompt": text})
    assert len(handed) == 1
    assert (first.unknown, again.prompts) == (None, first.prompts)
    await fleet.tokenize({"prompt": text * (1 + prompts.REMEMBERED_BYTES // len(text))})
    assert len(handed) == 2


class Slow:
    """Bundles that are parsed when told to, and what was parsed and built: whether by the event loop's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[bool] = []
        self.built: list[bool] = []
        self.go_on = threading.Event()
        from_json, slow = PromptBundle.from_json, self

        class Processor(prompts.PromptProcessor):
            def __init__(self, bundle: PromptBundle) -> None:
                slow.built.append(threading.current_thread() is threading.main_thread())
                super().__init__(bundle)

        def reading(data: bytes) -> PromptBundle:
            slow.read.append(threading.current_thread() is threading.main_thread())
            slow.go_on.wait(60)
            return from_json(data)

        monkeypatch.setattr(prompts, "PromptProcessor", Processor)
        monkeypatch.setattr(PromptBundle, "from_json", staticmethod(reading))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(monkeypatch)
    yield slow
    slow.go_on.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """All at once it is so much later for the event loop."""
    loop = asyncio.get_running_loop()
    time_of = loop.time
    monkeypatch.setattr(loop, "time", lambda: time_of() + seconds)


async def test_many_replicas_of_one_slow_bundle_are_one_download_and_one_processor(
    fleet: Replicas, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold start of many replicas: the others need only say that theirs is the same, however long that takes to parse."""
    for _ in range(40):
        await fleet.add(bundle())
    learning = asyncio.create_task(fleet.learnt(40))
    await until(lambda: len(slow.read) == 1)
    later(monkeypatch, prompts.FETCH_S - 2.0)
    for _ in range(20):  # what waited less than that asks before this is answered
        async with aiohttp.ClientSession() as session, session.get(f"http://{fleet.replicas[-1].endpoint}/") as response:
            assert response.status == 404
    assert fleet.asked == 1
    later(monkeypatch, 2.0)  # nobody waits for the first one any more, and the bundle is still not parsed
    await until(lambda: fleet.asked == 40 or fleet.downloads > 1)
    slow.go_on.set()
    await learning
    assert slow.built == slow.read == [False]
    assert fleet.downloads == 1


async def test_pools_of_one_bundle_parse_it_once(fleet: Replicas, slow: Slow) -> None:
    """The pools' first replicas ask at the same time, and the second answer is found to be the bundle that is on its way."""
    both = asyncio.Barrier(2)

    async def together() -> None:
        await both.wait()

    for pool in ("ns/m/p", "ns/m/q"):
        await fleet.add(bundle(), first=together, pool=pool)
    learning = asyncio.create_task(fleet.learnt(2))
    await until(lambda: len(slow.read) >= 1 and fleet.downloads == 2)
    slow.go_on.set()
    await learning
    assert slow.built == slow.read == [False]


async def test_where_the_first_replica_fails_the_next_one_is_asked_before_the_others(fleet: Replicas, slow: Slow) -> None:
    async def fails() -> None:
        raise web.HTTPServiceUnavailable

    await fleet.add(bundle(), first=fails)
    for _ in range(12):
        await fleet.add(bundle())
    slow.go_on.set()
    await fleet.learnt(12)
    assert slow.read == [False]
    assert fleet.downloads == 1


@pytest.mark.parametrize("of_the_same_bundle", [True, False], ids=["one bundle", "two bundles"])
async def test_a_first_replica_that_hangs_holds_the_others_up_no_longer_than_a_download_may_take(
    of_the_same_bundle: bool, fleet: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, loop = asyncio.Event(), asyncio.get_running_loop()

    async def hangs() -> None:
        await never.wait()

    for _ in range(3):
        await fleet.add(bundle(), first=hangs)
    for n in range(12):
        await fleet.add(bundle(block_size=16 if of_the_same_bundle or n % 2 else 8))
    began = loop.time()
    learning = asyncio.create_task(fleet.learnt(12))
    await until(lambda: fleet.asked == 1)
    later(monkeypatch, prompts.FETCH_S)
    await learning
    never.set()
    assert set(fleet.library._digests) == {key_of(replica) for replica in fleet.replicas[3:]}
    assert loop.time() - began < 2 * prompts.FETCH_S


async def test_a_bundle_that_breaks_off_is_taken_from_the_next_replica(fleet: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for it, in another pool, need not wait for another try of the replica that failed."""
    monkeypatch.setattr(prompts, "RETRY_S", 3600.0)
    waiting, from_json = threading.Event(), PromptBundle.from_json
    calls: list[bytes] = []

    def reading(data: bytes) -> PromptBundle:
        calls.append(data)
        if len(calls) == 1:
            waiting.wait(60)
            raise ValueError("broken")
        return from_json(data)

    monkeypatch.setattr(PromptBundle, "from_json", staticmethod(reading))
    first, second = await fleet.add(bundle()), await fleet.add(bundle(), pool="ns/m/q")
    learning = asyncio.create_task(fleet.learnt(1))
    await until(lambda: fleet.asked == 2)
    waiting.set()
    await learning
    assert len(calls) == 2 and len(fleet.library._digests) == 1
    assert {key_of(first), key_of(second)} == fleet.library._digests.keys() | fleet.library._retry_at.keys()


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"prompt": "' + b"x" * 400 + b'"}', 104),
        (b'{"url": "data:image/png;base64,' + b"A" * 4000 + b'", "text": "' + b"x" * 400 + b'"}', 106),
        (b'["data:image/png;base64,' + b"A" * 4000 + b'", "data:;base64,' + b"A" * 800 + b'"]', 2),
        (b'{"prompt": "data: ' + b"word " * 80 + b'"}', 106),
        (b'{"url": "data:' + b"A" * 400, 104),
    ],
    ids=["text", "an image and text", "two images", "text that only begins like a file", "cut off"],
)
def test_files_in_a_body_are_no_text_of_its_prompt(body: bytes, tokens: int) -> None:
    assert guessed_tokens(body) == tokens
