"""HTTPS and client certificates, with an authority that the test makes."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from frontend_fakes import FakeCore

from penstock.engine.args import EngineArgs
from penstock.engine.cli import _api_settings, _parser
from penstock.engine.config import ConfigError
from penstock.engine.frontend.processes.serve import Ending, ServeConfig, serve_http
from testing.ports import free_ports

MODEL = Path(__file__).parents[3] / "examples/models/penstock-tiny"
BODY = {"model": str(MODEL), "prompt": "the mill", "max_tokens": 2}


@contextlib.asynccontextmanager
async def served(folder: Path, *flags: str) -> AsyncIterator[str]:
    """A frontend over a core without a model; yields its address."""
    port, events, replay = free_ports(3)
    pair = ("--ssl-certfile", str(folder / "tls.crt"), "--ssl-keyfile", str(folder / "tls.key"))
    config = ServeConfig(
        engine=EngineArgs(model=str(MODEL)).config(),
        host="127.0.0.1",
        port=port,
        events_port=events,
        replay_port=replay,
        shutdown_timeout=1.0,
        log_stats=False,
        api=_api_settings(_parser().parse_args(["m", *pair, *flags])),
    )
    core, ending = FakeCore(lambda request: ([5, 6], 0)), Ending()
    task = asyncio.create_task(serve_http([core], config, ending))
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                assert not task.done(), task.exception()
                await asyncio.sleep(0.02)
        yield f"https://127.0.0.1:{port}"
    finally:
        ending.stop.set()
        await task


def client(trusted: Path, own: Path | None = None) -> aiohttp.ClientSession:
    context = ssl.create_default_context(cafile=str(trusted / "ca.crt"))
    if own is not None:
        context.load_cert_chain(own / "tls.crt", own / "tls.key")
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, force_close=True))


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.02)


async def test_who_is_known_gets_answers_and_probes_need_no_certificate(tmp_path: Path, make_authority: Any) -> None:
    authority = make_authority()
    engine, known = authority.mount(tmp_path / "engine"), authority.mount(tmp_path / "client", name="gateway")
    stranger = make_authority().mount(tmp_path / "stranger")
    async with served(engine, "--ssl-ca-certs", str(engine / "ca.crt")) as url:
        async with client(engine, known) as session:
            await ready(session, url)
            async with session.get(f"{url}/v1/models") as response:
                assert response.status == 200
        async with client(engine) as nobody:
            for probed in ("/health", "/live", "/ready"):
                async with nobody.get(f"{url}{probed}") as response:
                    assert response.status == 200
            for path in ("/load", "/metrics", "/prompt-bundle", "/v1/models"):
                async with nobody.get(f"{url}{path}") as response:
                    assert response.status == 403
                    assert (await response.json())["error"]["code"] == "client_certificate_required"
            async with nobody.post(f"{url}/v1/completions", json=BODY) as response:
                assert response.status == 403
        async with client(engine, stranger) as forged:
            with pytest.raises(aiohttp.ClientError):  # not even a probe: the handshake ends
                await forged.get(f"{url}/health")
        async with client(stranger) as wary:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await wary.get(f"{url}/health")
        async with aiohttp.ClientSession() as plain:
            with pytest.raises(aiohttp.ClientError):  # nothing is answered in clear
                await plain.get(url.replace("https", "http") + "/health")


async def test_new_files_count_from_the_next_handshake_and_broken_ones_do_not(
    tmp_path: Path, make_authority: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_authority(), make_authority()
    engine = first.mount(tmp_path / "engine")
    old = first.mount(tmp_path / "old")
    async with served(engine, "--ssl-ca-certs", str(engine / "ca.crt")) as url:
        async with client(old, old) as session:
            await ready(session, url)
            second.mount(engine, "two")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"{url}/load")
        new = second.mount(tmp_path / "new")
        async with client(new, old) as formerly:
            with pytest.raises(aiohttp.ClientError):  # whom the first authority vouches for is not known any more
                await formerly.get(f"{url}/load")
        (engine / "two/tls.key").write_text("half of it")
        async with client(new, new) as session:
            for _ in range(2):
                async with session.get(f"{url}/v1/models") as response:
                    assert response.status == 200
    assert caplog.text.count("the certificate stays as it was") == 1


def request_on(
    context: ssl.SSLContext, port: int, session: ssl.SSLSession | None = None
) -> tuple[int | None, ssl.SSLSession | None]:
    """One GET: its status, and the TLS session for the next connection.

    A server that ends the connection gives no status.
    """
    plain = socket.create_connection(("127.0.0.1", port), timeout=60)
    try:
        with context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
            return int(answer.split()[1]) if answer else None, connection.session
    except (ssl.SSLError, ConnectionError):
        return None, None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda version: version.name)
async def test_a_resumed_session_does_not_outlive_the_authority_that_vouched_for_it(
    tmp_path: Path, make_authority: Any, version: ssl.TLSVersion
) -> None:
    authority, clients = make_authority(), tmp_path / "clients.crt"
    engine, known = authority.mount(tmp_path / "engine"), authority.mount(tmp_path / "client", name="gateway")
    clients.write_bytes((engine / "ca.crt").read_bytes())
    context = ssl.create_default_context(cafile=str(engine / "ca.crt"))
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(known / "tls.crt", known / "tls.key")
    async with served(engine, "--ssl-ca-certs", str(clients)) as url:
        async with client(engine, known) as session:
            await ready(session, url)
        port = int(url.rpartition(":")[2])
        status, offered = await asyncio.to_thread(request_on, context, port)
        assert status == 200
        clients.write_bytes((make_authority().mount(tmp_path / "other") / "ca.crt").read_bytes())
        status, _ = await asyncio.to_thread(request_on, context, port, offered)
        assert status is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ssl-certfile", "tls.crt"], "come together"),
        (["--ssl-ca-certs", "ca.crt"], "come together"),
        (["--ssl-certfile", "none.crt", "--ssl-keyfile", "tls.key"], "none.crt"),
        (["--ssl-certfile", "tls.crt", "--ssl-keyfile", "other.key"], "other.key"),
        (["--ssl-certfile", "tls.crt", "--ssl-keyfile", "tls.key", "--ssl-ca-certs", "tls.key"], "--ssl-ca-certs"),
    ],
)
def test_files_that_cannot_be_used_are_said_at_the_start(
    tmp_path: Path, make_authority: Any, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
) -> None:
    authority = make_authority()
    monkeypatch.chdir(authority.mount(tmp_path / "one"))
    (tmp_path / "one/other.key").write_bytes((authority.mount(tmp_path / "two") / "tls.key").read_bytes())
    with pytest.raises(ConfigError, match=words):
        _api_settings(_parser().parse_args(["m", *flags]))
