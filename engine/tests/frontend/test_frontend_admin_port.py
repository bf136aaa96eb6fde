"""A port of its own for what changes the engine: there and nowhere else, with the same keys."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from frontend_fakes import FakeCore

from penstock.engine.cli import _config, _parser
from penstock.engine.config import ConfigError
from penstock.engine.frontend.processes.serve import Ending, ServeConfig, serve_http
from penstock.engine.frontend.processes.supervisor import supervise
from testing.ports import free_ports

MODEL = str(Path(__file__).parents[3] / "examples/models/penstock-tiny")
ALLOWED = ("--enable-control-endpoints", "--enable-lora", "--allow-runtime-lora-updating")
ADMINISTRATIVE = (
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    *(("POST", f"/{name}") for name in ("pause", "resume", "sleep", "wake_up", "reload_weights", "reset_prefix_cache")),
    *(("POST", f"/{name}") for name in ("pin_prefix", "unpin_prefix", "start_profile", "stop_profile")),
    ("GET", "/is_paused"),
    ("GET", "/is_sleeping"),
)


class ObedientCore(FakeCore):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    async def call(self, command: Any) -> None:
        self.told.append(command)


def config(port: int, *flags: str) -> ServeConfig:
    events, replay = free_ports(2)
    ports = ("--port", str(port), "--events-port", str(events), "--replay-port", str(replay))
    return _config(_parser().parse_args([MODEL, *ports, "--disable-log-stats", *flags]))


@contextlib.asynccontextmanager
async def served(core: FakeCore, port: int, *flags: str) -> AsyncIterator[aiohttp.ClientSession]:
    ending = Ending()
    task = asyncio.create_task(serve_http([core], config(port, *flags), ending))
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while not await _ready(session, port):
                assert not task.done(), task.exception()
                await asyncio.sleep(0.02)
            yield session
    finally:
        ending.stop.set()
        await task


async def _ready(session: aiohttp.ClientSession, port: int) -> bool:
    with contextlib.suppress(aiohttp.ClientConnectionError):
        async with session.get(f"http://127.0.0.1:{port}/ready") as response:
            return response.status == 200
    return False


async def statuses(session: aiohttp.ClientSession, port: int, **headers: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for method, path in ADMINISTRATIVE:
        async with session.request(method, f"http://127.0.0.1:{port}{path}", json={}, headers=headers) as response:
            found[path] = response.status
    return found


async def test_what_changes_the_engine_answers_on_its_own_port_alone() -> None:
    port, admin = free_ports(2)
    core = ObedientCore()
    async with served(core, port, *ALLOWED, "--admin-port", str(admin)) as session:
        assert set((await statuses(session, port)).values()) == {404}
        assert core.told == []
        there = await statuses(session, admin)
        # Those that need arguments, and get none, say so.
        assert set(there.values()) == {200, 400} and there["/sleep"] == there["/is_paused"] == 200
        assert {type(it).__name__ for it in core.told} >= {"Sleep", "WakeUp", "ResetPrefixCache", "StartProfile"}
        async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
            assert response.status == 200
        for path in ("/v1/models", "/metrics", "/health"):
            async with session.get(f"http://127.0.0.1:{admin}{path}") as response:
                assert response.status == 404


async def test_without_that_port_all_is_on_one() -> None:
    (port,) = free_ports(1)
    async with served(ObedientCore(), port, *ALLOWED) as session:
        assert set((await statuses(session, port)).values()) == {200, 400}


async def test_the_port_opens_nothing_that_is_not_allowed_and_keys_are_asked_for_there_too() -> None:
    port, admin = free_ports(2)
    async with served(ObedientCore(), port, "--admin-port", str(admin)) as session:
        assert set((await statuses(session, admin)).values()) == {404}
    async with served(ObedientCore(), port, *ALLOWED, "--admin-port", str(admin), "--api-key", "sesame") as session:
        assert set((await statuses(session, admin)).values()) == {401}
        assert set((await statuses(session, admin, authorization="Bearer sesame")).values()) == {200, 400}


@pytest.mark.parametrize("frontends", ["1", "2"])
async def test_a_port_that_is_taken_is_named(frontends: str) -> None:
    port, admin = free_ports(2)
    with pytest.raises(ConfigError, match=f"--admin-port {port} is the --port too"):
        config(port, "--admin-port", str(port))
    taken = config(port, "--admin-port", str(admin), "--api-server-count", frontends)
    with socket.create_server(("127.0.0.1", admin)), pytest.raises(ConfigError, match=f"127.0.0.1 --admin-port {admin}: "):
        await (serve_http([FakeCore()], taken, Ending()) if frontends == "1" else supervise(taken))
