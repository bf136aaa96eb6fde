"""A real Envoy, engines that are small HTTP servers, and processes that never outlive their test."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from penstock.api import headers
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.compiled import installed
from testing.ports import free_ports

POOL = "default/tiny/main"
MODEL = "default/tiny"
WITHOUT_NATIVE = Path(__file__).parent.parent / "without_native"


@dataclass
class Engine:
    """What Envoy and the picker see of an engine: its endpoints, and how it fails."""

    name: str
    host: str
    port: int
    chunks: int = 3
    think_s: float = 0.0
    """Before the answer's head."""
    pause_s: float = 0.0
    """Before each chunk of a stream."""
    refuse: str = ""
    """`retriable`: 503 that says nothing was done; `plain`: one that does not; `reset`: the connection breaks; `torn`: it does so
    after the answer's first bytes."""
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    finished: int = 0
    fail: int = 0
    """The status of an engine that answers, and cannot do what it is asked; 0: it can."""
    names: tuple[str, ...] = ("tiny",)
    """What `/v1/models` says."""
    adapters: tuple[str, ...] | None = None
    """What `/load` says it has beside them; requests for anything else are a 404. None: there is no such page."""
    looked_at: int = 0
    """How often it was asked for its load."""
    says: dict[str, str] = field(default_factory=dict)
    """More headers of its answers."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is clear an answer waits: a stream after its first chunk, any other before its head."""

    def __post_init__(self) -> None:
        self.go_on.set()

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def replica(self, **changes: Any) -> Replica:
        known: dict[str, Any] = {
            "uid": f"uid-{self.name}", "name": self.name, "pool": POOL, "host": self.host, "port": self.port,
            "events_port": 1, "replay_port": 2, "ready": True,
        }  # fmt: skip
        return Replica(**{**known, **changes})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.names]})

    async def load(self, _: web.Request) -> web.Response:
        if self.adapters is None:
            return web.Response(status=404)
        self.looked_at += 1
        report = LoadReport(epoch=1, seq=self.looked_at, max_num_seqs=64, adapters=self.adapters)
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(({name.lower(): value for name, value in request.headers.items()}, body))
        if self.adapters is not None and json.loads(body)["model"] not in (*self.names, *self.adapters):
            return web.json_response({"error": {"message": "there is no such model here"}}, status=404)
        if self.refuse == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.refuse == "torn":
            torn = web.StreamResponse()
            await torn.prepare(request)
            await torn.write(_CHUNK % 0)
            assert request.transport is not None
            request.transport.close()
            return torn
        await asyncio.sleep(self.think_s)
        if self.fail:
            return web.json_response({"error": {"message": "broken"}}, status=self.fail)
        if self.refuse:
            marks = {headers.RETRIABLE: "true"} if self.refuse == "retriable" else {}
            return web.json_response({"error": {"message": "draining"}}, status=503, headers={"retry-after": "7", **marks})
        load = {headers.LOAD: "TEXT named_metrics.num_requests_running=1"} if headers.LOAD_FORMAT in request.headers else {}
        says = {**self.says, **load}
        if b'"stream": true' not in body and b'"stream":true' not in body:
            await self.go_on.wait()
            return web.json_response({"id": self.name, "object": "chat.completion", "choices": [_CHOICE]}, headers=says)
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **says})
        await response.prepare(request)
        for index in range(self.chunks):
            await asyncio.sleep(self.pause_s)
            await response.write(_CHUNK % index)
            await self.go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        self.finished += 1
        return response


_CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
_CHUNK = (
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"tiny",'
    b'"choices":[{"index":0,"delta":{"content":"%d "},"finish_reason":null}]}\n\n'
)


@pytest.fixture
async def engine() -> AsyncIterator[Callable[[str], Any]]:
    """`await engine(name)` starts one more engine."""
    runners: list[web.AppRunner] = []

    async def start(name: str) -> Engine:
        its = Engine(name, "127.0.0.1", free_ports(1)[0])
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", its.complete)
        app.router.add_get("/v1/models", its.models)
        app.router.add_get("/load", its.load)
        app.router.add_get("/prompt-bundle", _not_here)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, its.host, its.port).start()
        runners.append(runner)
        return its

    yield start
    for runner in runners:
        await runner.cleanup()


async def _not_here(_: web.Request) -> web.Response:
    return web.Response(status=404)


def fleet_of(*replicas: Replica, hold_timeout_s: float = 1.0) -> Fleet:
    """One model `tiny` with one pool and these replicas."""
    model = Model(id=MODEL, served_names=["tiny"], policy="RoundRobin", hold_timeout_s=hold_timeout_s)
    return Fleet(models=[model], pools=[Pool(id=POOL, model=MODEL)], replicas=list(replicas))


def found_in_python() -> dict[str, str]:
    """The environment of a gateway that is to find no compiled parts, although they are installed."""
    if installed() is None:
        pytest.skip("penstock-gateway-native is not built: the gateway is Python's in any case")
    there = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(WITHOUT_NATIVE), *([there] if there else [])])}


class Processes:
    """Starts commands of `penstock` and ends them all, whatever happens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment: dict[str, str] = {}
        """What they find beside our own."""
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.spawn(name, sys.executable, "-m", "penstock.cli", *arguments)

    def spawn(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        # From this, the main thread: a child may ask to die with the thread that started it.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._running.append(process)
        return process

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def stop(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started: Envoy is a child of `penstock envoy`
        for process in self._running:
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    all_of_them = Processes(tmp_path)
    try:
        yield all_of_them
    finally:
        all_of_them.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(name="fleet_of")
def fleet_of_fixture() -> Callable[..., Fleet]:
    return fleet_of


@pytest.fixture(scope="session")
def ports() -> Callable[[int], list[int]]:
    return free_ports


@pytest.fixture(scope="session")
def in_python() -> Callable[[], dict[str, str]]:
    """`Processes.environment` of a gateway in Python; skips where there is no other."""
    return found_in_python


@pytest.fixture(scope="session")
def make_processes() -> Callable[[Path], Processes]:
    return Processes
