"""Who may see `/debug/*` and the console, and what stays open to the autoscaler, Prometheus and probes."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.api import headers
from penstock.gateway.http.access import DebugToken
from penstock.gateway.process import Gateway, GatewaySettings
from penstock.gateway.xds.listener import ListenerSettings

OPEN = ("/pools", "/metrics", "/healthz")
DEBUG = ("/debug/models", "/debug/decisions", "/debug/failures", "/debug/tenants", "/debug/xds", "/debug/tls")


class Nothing:
    """A discovery that says nothing."""

    async def watch(self) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield


@contextlib.asynccontextmanager
async def running(host: str = "0.0.0.0", **changes: Any) -> AsyncIterator[tuple[aiohttp.ClientSession, int]]:
    settings = GatewaySettings(
        name="gw", host=host, grpc_port=0, http_port=0, listener=ListenerSettings(host="127.0.0.1", port=1), **changes
    )
    stop, started = asyncio.Event(), asyncio.Event()
    gateway = Gateway(settings, Nothing())
    task = asyncio.create_task(gateway.run(stop, started))
    await started.wait()
    try:
        async with aiohttp.ClientSession() as session:
            yield session, gateway.http_port
    finally:
        stop.set()
        await task


async def status(session: aiohttp.ClientSession, url: str, **sent: str) -> int:
    async with session.get(url, headers=sent) as response:
        return response.status


def own_address() -> str:
    """An address of this machine that is not a loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but its loopback")
        return probe.getsockname()[0]


async def test_without_a_token_only_this_machine_sees_them() -> None:
    far = own_address()
    async with running() as (session, port):
        for path in (*DEBUG, "/console"):
            assert await status(session, f"http://127.0.0.1:{port}{path}") == 200
            assert await status(session, f"http://{far}:{port}{path}") == 403
            assert await status(session, f"http://127.0.0.1:{port}{path}", host="attacker.example") == 403
            assert await status(session, f"http://127.0.0.1:{port}{path}", host=f"localhost:{port}") == 200
        for path in OPEN:
            assert await status(session, f"http://{far}:{port}{path}") == 200


async def test_a_gateway_on_a_pods_address_answers_a_port_forward() -> None:
    far = own_address()
    async with running(host=far) as (session, port):
        assert await status(session, f"http://127.0.0.1:{port}/debug/models") == 200
        assert await status(session, f"http://{far}:{port}/debug/models") == 403


async def test_with_a_token_whoever_has_it_sees_them(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    far = own_address()
    async with running(debug_token=file) as (session, port):
        for host in ("127.0.0.1", far):
            for path in DEBUG:
                url = f"http://{host}:{port}{path}"
                assert await status(session, url) == 401
                assert await status(session, url, authorization="Bearer second") == 401
                assert await status(session, url, authorization="Basic first") == 401
                assert await status(session, url, authorization="Bearer first") == 200
            for path in (*OPEN, "/console"):
                assert await status(session, f"http://{host}:{port}{path}") == 200
        file.with_suffix(".new").write_text("second")
        file.with_suffix(".new").replace(file)
        assert await status(session, f"http://{far}:{port}/debug/models", authorization="Bearer first") == 401
        assert await status(session, f"http://{far}:{port}/debug/models", authorization="Bearer second") == 200


async def test_the_page_can_be_left_out() -> None:
    async with running(console=False) as (session, port):
        assert await status(session, f"http://127.0.0.1:{port}/console") == 404
        assert await status(session, f"http://127.0.0.1:{port}/debug/models") == 200


def test_a_token_file_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        DebugToken(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="the file is empty"):
        DebugToken(tmp_path / "empty")


async def test_failures_are_told_newest_first(world: Any) -> None:
    await world.ready()
    stream = world.stream()
    await stream.ask({"model": "nobody", "prompt": "w1"}, **{headers.REQUEST_ID: "r-1"})
    await world.stream().ask(world.completion(), **{"content-encoding": "gzip", headers.REQUEST_ID: "r-2"})
    last, first = await world.get("/debug/failures")
    assert (last["request_id"], last["status"], last["reason"]) == ("r-2", 415, "unsupported_encoding")
    assert (first["request_id"], first["status"], first["reason"]) == ("r-1", 404, "model_not_found")
    assert first["message"].startswith("model 'nobody' does not exist")
    assert len(await world.get("/debug/failures?n=1")) == 1
