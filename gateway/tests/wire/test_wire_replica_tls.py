"""TLS to replicas through a real Envoy: engines that demand certificates, files that are replaced, authorities that are wrong."""

import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from wire_waiting import eventually

from penstock.api.load_report import LoadReport

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def over_tls() -> AsyncIterator[Callable[[Any, Path], Any]]:
    """`await over_tls(engine, folder)` serves an engine by the folder's certificate, to those that its CA has signed."""
    runners: list[web.AppRunner] = []

    async def start(engine: Any, folder: Path) -> int:
        async def load(_: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(LoadReport(epoch=1, seq=1)))

        app = web.Application()
        app.router.add_post("/v1/chat/completions", engine.complete)
        app.router.add_get("/load", load)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.load_verify_locations(folder / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        runners.append(runner)
        return runner.addresses[0][1]

    yield start
    for runner in runners:
        await runner.cleanup()


class System:
    """A gateway and an Envoy with `--replica-tls`."""

    def __init__(self, folder: Path, processes: Any, ports: list[int]) -> None:
        self._folder, self._processes = folder, processes
        port, _, http_port, admin = ports
        self.url, self._http, self._admin = (f"http://127.0.0.1:{it}" for it in (port, http_port, admin))
        self._ports = ports

    def start(self, fleet: Any, files: Path, *flags: str) -> None:
        self.start_gateway(fleet, files, *flags)
        self.start_envoy()

    def start_gateway(self, fleet: Any, files: Path, *flags: str) -> None:
        (self._folder / "fleet.json").write_bytes(msgspec.json.encode(fleet))
        port, grpc_port, http_port, _ = (str(it) for it in self._ports)
        gateway = ["gateway", "--discovery", f"file:{self._folder / 'fleet.json'}", "--name", "test"]
        gateway += ["--grpc-port", grpc_port, "--http-port", http_port, "--listener-host", "127.0.0.1", "--listener-port", port]
        self._processes.start("gateway", *gateway, "--replica-tls", str(files), *flags)

    def start_envoy(self) -> None:
        _, grpc_port, _, admin = (str(it) for it in self._ports)
        envoy = ["envoy", "--gateway", f"127.0.0.1:{grpc_port}", "--concurrency", "1", "--node-id", "test"]
        self._processes.start("envoy", *envoy, "--admin-port", admin)

    async def ask(self, client: aiohttp.ClientSession) -> tuple[int, str]:
        async with client.post(f"{self.url}/v1/chat/completions", json=BODY) as response:
            return response.status, response.headers.get("x-penstock-reason", "")

    async def debug(self, client: aiohttp.ClientSession, what: str) -> Any:
        async with client.get(f"{self._http}/debug/{what}") as response:
            return await response.json()

    async def stat(self, client: aiohttp.ClientSession, name: str) -> int:
        async with client.get(f"{self._admin}/stats?filter={name}$") as response:
            return sum(int(line.rpartition(" ")[2]) for line in (await response.text()).splitlines())


@pytest.fixture
def system(tmp_path: Path, processes: Any, ports: Any) -> System:
    return System(tmp_path, processes, ports(4))


async def test_both_sides_prove_who_they_are_and_go_on_when_files_are_replaced(
    tmp_path: Path, system: System, engine: Any, fleet_of: Any, over_tls: Any, client: Any, make_authority: Any
) -> None:
    first, second = make_authority(), make_authority()
    its = await engine("only")
    old = await over_tls(its, first.mount(tmp_path / "old", name="replica.test"))
    files = first.mount(tmp_path / "files", name="gateway")
    system.start(fleet_of(its.replica(port=old)), files, "--replica-name", "replica.test")

    async def answers() -> bool:
        return await system.ask(client) == (200, "")

    await eventually(answers)
    assert await system.stat(client, "cluster.default/tiny/main.ssl.handshake") > 0

    async def states() -> list[str]:
        return [it["state"] for it in await system.debug(client, "tls")]

    async def known() -> bool:
        return await states() == ["ok"]

    await eventually(known)

    # The replica moves to another authority: refused by both, until the files say that it is to be believed.
    new = await over_tls(its, second.mount(tmp_path / "new", name="replica.test"))
    (tmp_path / "fleet.next").write_bytes(msgspec.json.encode(fleet_of(its.replica(port=new))))
    (tmp_path / "fleet.next").replace(tmp_path / "fleet.json")

    async def failed() -> bool:
        return await states() == ["failed"]

    await eventually(failed)
    assert "CERTIFICATE_VERIFY_FAILED" in (await system.debug(client, "tls"))[0]["why"]
    asked = len(its.requests)
    assert await system.ask(client) == (503, "replica_failed")
    assert len(its.requests) == asked
    second.mount(files, "two", name="gateway")
    await eventually(answers)
    await eventually(known)


async def test_a_certificate_for_another_name_is_not_enough(
    tmp_path: Path, system: System, engine: Any, fleet_of: Any, over_tls: Any, client: Any, make_authority: Any
) -> None:
    authority, its = make_authority(), await engine("only")
    port = await over_tls(its, authority.mount(tmp_path / "other", name="somebody.else"))
    files = authority.mount(tmp_path / "files", name="gateway")
    system.start(fleet_of(its.replica(port=port)), files, "--replica-name", "replica.test")

    async def failed() -> Any:
        return [it["why"] for it in await system.debug(client, "tls") if it["state"] == "failed"]

    assert "doesn't match" in (await eventually(failed))[0] or "mismatch" in (await failed())[0]

    async def refused() -> bool:
        return await system.ask(client) == (503, "replica_failed")

    await eventually(refused)
    assert await system.stat(client, "ssl.fail_verify_san") > 0
    assert its.requests == []


async def test_files_that_envoy_cannot_use_are_refused_by_name_and_nothing_goes_out_in_clear(
    tmp_path: Path, system: System, engine: Any, fleet_of: Any, client: Any, make_authority: Any
) -> None:
    its, files = await engine("plain"), make_authority().mount(tmp_path / "files")
    system.start_gateway(fleet_of(its.replica()), files)

    async def runs() -> bool:
        return bool(await system.debug(client, "tls"))

    await eventually(runs)
    (files / "one/ca.crt").write_text("nothing")  # what Envoy finds at its place need not be what the gateway has
    system.start_envoy()

    async def refusals() -> Any:
        envoys = await system.debug(client, "xds")
        return [it for envoy in envoys for it in envoy["types"].get("Secret", {}).get("refusals", ())]

    [refusal] = await eventually(refusals)
    assert refusal["resources"] == ["penstock_replica_ca"] and "certificate" in refusal["message"]

    async def refused() -> bool:
        return (await system.ask(client))[0] == 503

    await eventually(refused)
    assert its.requests == []
