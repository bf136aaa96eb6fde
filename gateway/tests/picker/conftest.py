"""A gateway process between a raw gRPC client, in Envoy's place, and small HTTP servers, in the engines'."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import orjson
import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.api import headers
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.process import Gateway, GatewaySettings
from penstock.gateway.xds.listener import ListenerSettings
from penstock.prompt.bundle import PromptBundle

WORDS = [f"w{n}" for n in range(100)]
PROMPT = " ".join(WORDS[:64])
TOKENIZER = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="w0"))
TOKENIZER.pre_tokenizer = pre_tokenizers.Whitespace()
BUNDLE = PromptBundle(
    served_names=("tiny",),
    tokenizer=TOKENIZER.to_str(),
    chat_template=None,
    special_tokens={},
    block_size=16,
    hash_seed="penstock",
    max_model_len=512,
)


class Engine:
    """A replica's HTTP side."""

    def __init__(self) -> None:
        self.report = LoadReport(epoch=1, seq=1, max_num_seqs=32, prefill_tokens_per_s=1000.0, decode_step_s=0.01)
        self.ranks: list[LoadReport] = []
        """Reports of its data-parallel ranks, where it has several."""
        self.bundles = 0
        self.going = asyncio.Event()
        """Cleared: as a process that was stopped, it takes connections and answers nothing."""
        self.going.set()

    async def start(self, stack: contextlib.AsyncExitStack) -> int:
        app = web.Application()
        app.add_routes([web.get("/load", self._load), web.get("/prompt-bundle", self._bundle)])
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    async def _load(self, _: web.Request) -> web.Response:
        await self.going.wait()
        told = msgspec.to_builtins(self.report)
        return web.Response(body=msgspec.json.encode({**told, "data_parallel_ranks": self.ranks} if self.ranks else told))

    async def _bundle(self, request: web.Request) -> web.Response:
        self.bundles += 1
        tag = f'"{BUNDLE.digest}"'
        if tag in request.headers.get("if-none-match", ""):
            return web.Response(status=304, headers={"etag": tag})
        return web.Response(body=BUNDLE.to_json(), headers={"etag": tag})


class QueueDiscovery:
    """Yields what a test says."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Fleet] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[Fleet]:
        while True:
            yield await self.queue.get()


class World:
    """A gateway with two replicas of the model `tiny`."""

    def __init__(
        self,
        ext_proc: str = "lean",
        tenants: Path | None = None,
        audit_log: Path | None = None,
        debug_token: Path | None = None,
    ) -> None:
        self.discovery = QueueDiscovery()
        listener = ListenerSettings(host="127.0.0.1", port=1)
        settings = GatewaySettings(
            name="gw",
            host="127.0.0.1",
            grpc_port=0,
            http_port=0,
            listener=listener,
            ext_proc=ext_proc,
            tenants=tenants,
            audit_log=audit_log,
            debug_token=debug_token,
        )
        self.gateway = Gateway(settings, self.discovery)
        self.state = self.gateway._follower.state
        self.engines = [Engine(), Engine()]
        self.replicas: list[Replica] = []
        self.stop = asyncio.Event()
        self.prompt_tokens = TOKENIZER.encode(PROMPT).ids

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        for n, engine in enumerate(self.engines):
            port = await engine.start(stack)
            self.replicas.append(
                Replica(
                    uid=f"u{n}",
                    name=f"r{n}",
                    pool="ns/tiny/p",
                    host="127.0.0.1",
                    port=port,
                    events_port=1,
                    replay_port=1,
                    ready=True,
                )
            )
        started = asyncio.Event()
        self.task = asyncio.create_task(self.gateway.run(self.stop, started))
        stack.push_async_callback(self.shut_down)
        await started.wait()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.gateway.grpc_port}")
        stack.push_async_callback(self.channel.close)
        self.http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{self.gateway.http_port}"))

    async def shut_down(self) -> None:
        self.stop.set()
        await self.task

    def fleet(self, *replicas: Replica, hold_timeout_s: float = 60.0) -> None:
        model = Model(id="ns/tiny", served_names=["tiny", "alias"], created=7.0, hold_timeout_s=hold_timeout_s)
        pool = Pool(id="ns/tiny/p", model="ns/tiny")
        self.discovery.queue.put_nowait(Fleet(models=[model], pools=[pool], replicas=list(replicas)))

    async def ready(self, **changes: Any) -> None:
        self.fleet(*self.replicas, **changes)
        await self.until(lambda: all(self.state.reports.get(key_of(r)) for r in self.replicas))
        await self.until(lambda: len(self.gateway._prompts._digests) == len(self.replicas))

    async def get(self, path: str) -> Any:
        async with self.http.get(path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    def stream(self) -> "Stream":
        """One more request."""
        return Stream(self)

    @staticmethod
    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    @staticmethod
    def completion(**fields: Any) -> dict[str, Any]:
        return {"model": "tiny", "prompt": PROMPT, **fields}

    @staticmethod
    def destinations(answer: ProcessingResponse) -> list[str]:
        sets = answer.request_headers.response.header_mutation.set_headers
        values = {o.header.key: o.header.raw_value.decode() for o in sets}
        assert values[headers.POOL] == "ns/tiny/p"
        return values[headers.DESTINATION].split(",")

    @staticmethod
    def error(answer: ProcessingResponse) -> tuple[int, str, dict[str, Any], dict[str, str]]:
        """Status, reason, error object, headers."""
        immediate = answer.immediate_response
        sets = {o.header.key: o.header.raw_value.decode() for o in immediate.headers.set_headers}
        assert sets["content-type"] == "application/json"
        return immediate.status.code, sets[headers.REASON], orjson.loads(immediate.body)["error"], sets


@pytest.fixture
def ext_proc() -> str:
    """The front end of the gateway; files that show both name two."""
    return "lean"


@pytest.fixture
def tenants_file() -> Path | None:
    """None: no tenants; files that show tenants name one."""
    return None


@pytest.fixture
def audit_log() -> Path | None:
    """None: no audit log; files that show it name one."""
    return None


@pytest.fixture
def debug_token() -> Path | None:
    """None: no debug token; files that show it name one."""
    return None


@pytest.fixture
async def world(
    compiled: Compiled | None,
    ext_proc: str,
    tenants_file: Path | None,
    audit_log: Path | None,
    debug_token: Path | None,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[World]:
    """A gateway in Python and, where that is installed, one with the compiled parts."""
    monkeypatch.setattr("penstock.gateway.process.installed", lambda: compiled)
    monkeypatch.setattr("penstock.gateway.process.NOTICE_S", 0.0)  # no Envoy is to notice that it stops
    world = World(ext_proc, tenants_file, audit_log, debug_token)
    async with contextlib.AsyncExitStack() as stack:
        await world.start(stack)
        yield world


class Stream:
    """One request as Envoy would put it to the picker."""

    def __init__(self, world: World) -> None:
        self.call = ExternalProcessorStub(world.channel).Process()

    async def ask(
        self, body: Any = None, *, path: str = "/v1/completions", subset: Any = None, **more: str
    ) -> ProcessingResponse:
        """Sends the request; returns the first answer."""
        raw = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=not raw))
        fields = {":method": "POST" if raw else "GET", ":path": path, **more}
        for name, value in fields.items():
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode("latin-1"))
        message.protocol_config.request_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
        if subset is not None:
            message.metadata_context.filter_metadata[headers.SUBSET_NAMESPACE].update({headers.SUBSET: subset})
        answer = asyncio.ensure_future(self.call.read())
        await self.call.write(message)
        if raw:
            with contextlib.suppress(grpc.aio.AioRpcError):  # what can be answered by the head alone may be answered already
                await self.call.write(ProcessingRequest(request_body=HttpBody(body=raw, end_of_stream=True)))
        return await answer

    async def respond(self, status: int = 200, served: str | None = None, **fields: str) -> dict[str, str]:
        """Takes the body that goes on and sends response headers; returns what is added to them."""
        chunk = await self.call.read()
        assert chunk.WhichOneof("response") == "request_body"
        return await self.headers(status, served, **fields)

    async def headers(self, status: int = 200, served: str | None = None, **fields: str) -> dict[str, str]:
        """Sends response headers; returns what is added to them."""
        message = ProcessingRequest(response_headers=HttpHeaders())
        for name, value in {":status": str(status), **fields}.items():
            message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
        if served is not None:
            message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
        await self.call.write(message)
        answer = await self.call.read()
        mutation = answer.response_headers.response.header_mutation
        assert list(mutation.remove_headers) == list(headers.LOADS)
        return {o.header.key: o.header.raw_value.decode() for o in mutation.set_headers}

    async def end(self) -> None:
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
