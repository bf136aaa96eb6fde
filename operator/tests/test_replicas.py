"""How replicas are asked, against servers that answer as engines do, or worse."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.api.load_report import LoadReport
from penstock.http.replica_tls import ReplicaTls, TlsError
from penstock.operator import replicas as module
from penstock.operator.adapters.plan import Action, Origin
from penstock.operator.cli import operator
from penstock.operator.replicas import ReplicaError, Replicas, StillLoading

REPORT = LoadReport(epoch=1, seq=7, num_requests_running=3)


async def test_over_http_as_an_engine_answers() -> None:
    said: list[Any] = []

    async def models(_: web.Request) -> web.Response:
        base = {"id": "base", "object": "model"}
        return web.json_response({"data": [base, {"id": "sql", "parent": "base", "root": "/a/sql", "revision": "v1"}]})

    async def load(request: web.Request) -> web.Response:
        said.append(await request.json())
        return web.json_response({"error": {"message": "it is broken"}}, status=400)

    async def unload(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        raise AssertionError("nobody waits so long")

    app = web.Application()
    paths = ((web.get, "models", models), (web.post, "load_lora_adapter", load), (web.post, "unload_lora_adapter", unload))
    app.add_routes([route(f"/v1/{name}", handler) for route, name, handler in paths])
    runner, replicas = web.AppRunner(app, handler_cancellation=True), Replicas()
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        assert await replicas.adapters(base) == {"sql": Origin("/a/sql", "v1")}
        with pytest.raises(ReplicaError, match="it is broken"):
            await replicas.carry_out(base, Action("load", "sql", Origin("/a/sql", "v2")))
        assert said == [{"lora_name": "sql", "lora_path": "/a/sql", "load_inplace": True, "revision": "v2"}]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(StillLoading):
            patch.setattr(module, "ACT_S", 0.05)
            await replicas.carry_out(base, Action("unload", "sql", None))
        with pytest.raises(ReplicaError):
            await replicas.adapters("http://127.0.0.1:9")
    finally:
        await replicas.close()
        await runner.cleanup()


@pytest.mark.parametrize("status", [302, 307])
async def test_a_replica_leads_the_operator_nowhere_else_and_is_not_listened_to_for_ever(status: int) -> None:
    led: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        led.append(request.path)
        return web.json_response({"data": []})

    async def lead(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"location": "/elsewhere"})

    async def flood(_: web.Request) -> web.Response:
        return web.Response(body=b" " * 2**23)

    app = web.Application()
    app.add_routes([web.get("/v1/models", lead), web.post("/v1/load_lora_adapter", lead), web.get("/flood/v1/models", flood)])
    app.add_routes([web.route("*", "/elsewhere", elsewhere)])
    runner, replicas = web.AppRunner(app), Replicas()
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        with pytest.raises(ReplicaError, match=f"HTTP {status}"):
            await replicas.adapters(base)
        with pytest.raises(ReplicaError, match=f"HTTP {status}"):
            await replicas.carry_out(base, Action("load", "sql", Origin("/a/sql", None)))
        with pytest.raises(ReplicaError, match="more than"):
            await replicas.adapters(f"{base}/flood")
    finally:
        await replicas.close()
        await runner.cleanup()
    assert led == []


@contextlib.asynccontextmanager
async def answering(body: bytes | AsyncIterator[bytes], tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A replica that says this of its load and of what it serves; its address and port."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.add_routes([web.get("/load", answer), web.get("/v1/models", answer)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def clients(tls: ReplicaTls | None = None) -> AsyncIterator[Replicas]:
    its = Replicas(tls)
    try:
        yield its
    finally:
        await its.close()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"type": "LoadReport", "epoch": 1, "seq": 1, "kv_cache_usage_perc": 1e308}', "kv_cache_usage_perc"),
        (b'{"type": "LoadReport", "epoch": 1, "seq": 1, "num_requests_running": -5}', "num_requests_running"),
        (b" " * 2**23 + msgspec.json.encode(REPORT), "more than"),
        (b'{"type": "LoadReport"}', "not understood"),
        (b"{", "property name"),
        (b"[" * 2**20, "recursion"),
    ],
)
async def test_what_no_replica_can_have_said_of_its_load_is_refused(body: bytes, why: str) -> None:
    async with clients() as replicas:
        async with answering(msgspec.json.encode(REPORT)) as place:
            assert await replicas.load(f"http://{place}") == REPORT
        async with answering(body) as place:
            with pytest.raises(ReplicaError, match=why):
                await replicas.load(f"http://{place}")


@pytest.mark.parametrize("body", [b"[" * 2**20, b"[]", b'{"data": 1}', b'{"data": ["sql"]}', b'{"data": [{"parent": "base"}]}'])
async def test_what_is_no_list_of_models_is_refused(body: bytes) -> None:
    async with clients() as replicas, answering(body) as place:
        with pytest.raises(ReplicaError):
            await replicas.adapters(f"http://{place}")


async def test_a_replica_that_says_a_byte_at_a_time_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    monkeypatch.setattr(module, "LOAD_S", 0.1)
    async with clients() as replicas, answering(drip()) as place, asyncio.timeout(60):
        with pytest.raises(ReplicaError, match="no answer"):
            await replicas.load(f"http://{place}")


def presenting(folder: Path) -> ssl.SSLContext:
    """A replica's, that wants a certificate of its clients too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.fixture
def replica(make_authority: Any, tmp_path: Path) -> tuple[Any, ssl.SSLContext]:
    """Who signs a replica's certificate for the name `replica`, and its context."""
    authority = make_authority()
    return authority, presenting(authority.mount(tmp_path / "replica"))


@pytest.mark.parametrize("name", [None, "replica"])
async def test_a_replica_with_tls_is_believed_and_shown_who_asks(replica: Any, tmp_path: Path, name: str | None) -> None:
    authority, context = replica
    folder = authority.mount(tmp_path / "own", name="operator")
    async with answering(msgspec.json.encode(REPORT), context) as place, clients(ReplicaTls.of(folder, name)) as replicas:
        assert replicas.scheme == "https"
        assert await replicas.load(f"https://{place}") == REPORT


@pytest.mark.parametrize("wrong", ["authority", "name", "nothing presented", "plain"])
async def test_a_replica_that_cannot_prove_who_it_is_is_not_asked(
    replica: Any, make_authority: Any, tmp_path: Path, wrong: str
) -> None:
    authority, context = replica
    folder = (make_authority() if wrong == "authority" else authority).mount(tmp_path / "own")
    if wrong == "nothing presented":
        for file in ("tls.crt", "tls.key"):
            (folder / file).unlink()
    tls = ReplicaTls.of(folder, "another" if wrong == "name" else "replica")
    async with (
        answering(msgspec.json.encode(REPORT), None if wrong == "plain" else context) as place,
        clients(tls) as replicas,
    ):
        with pytest.raises(ReplicaError):
            await replicas.load(f"https://{place}")


async def test_files_that_are_replaced_count_from_then_on(replica: Any, make_authority: Any, tmp_path: Path) -> None:
    authority, context = replica
    folder = make_authority().mount(tmp_path / "own")
    async with answering(msgspec.json.encode(REPORT), context) as place, clients(ReplicaTls.of(folder, None)) as replicas:
        with pytest.raises(ReplicaError):
            await replicas.load(f"https://{place}")
        authority.mount(folder, "two")
        assert await replicas.load(f"https://{place}") == REPORT


def test_files_that_cannot_be_used_end_the_operator_at_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TlsError):
        ReplicaTls.of(tmp_path, None)
    assert operator([f"--replica-tls={tmp_path}", f"--kubeconfig={tmp_path / 'none'}"]) == 2
    assert "ca.crt" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        operator(["--replica-name=replica"])
