"""With `--fail-open` a real Envoy goes on serving when every gateway has gone, and as usual while one is there."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from penstock.api import headers
from penstock.api.fleet import Model, Pool
from penstock.gateway.cli import gateway as gateway_command

pytestmark = pytest.mark.slow

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


async def answers(client: aiohttp.ClientSession, url: str) -> None:
    """Waits until a gateway picks: before Envoy's first health check of it, an answer comes without one."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with client.post(url + PATH, json=BODY) as response:
                    if response.status == 200 and headers.MODEL in response.headers:
                        return
            except aiohttp.ClientError:
                pass  # not up yet
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("gateways", [1, 2])
async def test_with_every_picker_dead_healthy_replicas_serve_in_turn(
    tmp_path: Path, processes: Any, ports: Any, engine: Any, fleet_of: Any, client: aiohttp.ClientSession, gateways: int
) -> None:
    first, second, unready = [await engine(name) for name in ("first", "second", "unready")]
    fleet = fleet_of(first.replica(), second.replica(), unready.replica(ready=False))
    (tmp_path / "fleet.json").write_bytes(msgspec.json.encode(fleet))
    port, *free = ports(1 + 2 * gateways)
    running, known = [], []
    for n in range(gateways):
        where = ("--grpc-port", str(free[2 * n]), "--http-port", str(free[2 * n + 1]), "--name", f"gateway-{n}")
        listen = ("--listener-host", "127.0.0.1", "--listener-port", str(port))
        command = ("gateway", "--discovery", f"file:{tmp_path / 'fleet.json'}", *where, *listen, "--fail-open")
        running.append(processes.start(f"gateway-{n}", *command))
        known += ["--gateway", f"127.0.0.1:{free[2 * n]}"]
    processes.start("envoy", "envoy", *known, "--concurrency", "1", "--node-id", "test")
    url = f"http://127.0.0.1:{port}"
    await answers(client, url)
    body = json.dumps({**BODY, "padding": "x" * 5_000_000}).encode()
    async with client.post(url + PATH, data=body) as response:
        assert (response.status, response.headers[headers.REPLICA][:4]) == (200, "uid-")
    for path, method, status in (("/pause", "POST", 404), (PATH, "GET", 405)):
        async with client.request(method, url + path) as response:
            assert response.status == status

    for process in running:
        process.kill()
        process.wait()
    seen, forged = Counter[str](), {headers.DESTINATION: unready.endpoint, headers.POOL: "penstock_gateway"}
    for _ in range(10):
        async with client.post(url + PATH, data=body, headers={**forged, headers.LOAD_FORMAT: "TEXT"}) as response:
            assert response.status == 200, await response.text()
            assert headers.LOAD not in response.headers and headers.MODEL not in response.headers
            assert response.headers[headers.REPLICA] == f"uid-{(await response.json())['id']}"
            seen[(await response.json())["id"]] += 1
    assert seen == {"first": 5, "second": 5}
    assert first.requests[-1][1] == body
    async with client.post(f"{url}/pause") as response:
        assert response.status == 503, "engines' other paths are not for clients"
        assert (await response.json())["error"]["message"]
    assert not unready.requests


async def test_with_two_models_nothing_is_guessed(
    tmp_path: Path, processes: Any, ports: Any, engine: Any, fleet_of: Any, client: aiohttp.ClientSession
) -> None:
    only = await engine("only")
    fleet = fleet_of(only.replica())
    other = Model(id="default/other", served_names=["other"])
    fleet = msgspec.structs.replace(
        fleet, models=[*fleet.models, other], pools=[*fleet.pools, Pool(id="default/other/main", model=other.id)]
    )
    (tmp_path / "fleet.json").write_bytes(msgspec.json.encode(fleet))
    port, grpc_port, http_port = ports(3)
    where = ("--grpc-port", str(grpc_port), "--http-port", str(http_port))
    listen = ("--listener-host", "127.0.0.1", "--listener-port", str(port), "--fail-open")
    process = processes.start("gateway", "gateway", "--discovery", f"file:{tmp_path / 'fleet.json'}", *where, *listen)
    processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{grpc_port}", "--concurrency", "1", "--node-id", "test")
    await answers(client, f"http://127.0.0.1:{port}")
    process.kill()
    process.wait()
    async with client.post(f"http://127.0.0.1:{port}{PATH}", json=BODY) as response:
        assert response.status == 503


def test_tenants_are_not_served_without_a_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gateway_command(["--fail-open", "--tenants", str(tmp_path / "tenants.yaml")])
    assert "--fail-open and --tenants" in capsys.readouterr().err
