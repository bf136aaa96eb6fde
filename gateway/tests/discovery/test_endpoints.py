"""A fixed fleet by `--endpoint`: the replicas say what they serve."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from penstock.gateway import cli
from penstock.gateway.discovery import endpoints
from penstock.gateway.discovery.address import address_of
from penstock.gateway.discovery.endpoints import EndpointsDiscovery


class Engine:
    """Answers `/v1/models`."""

    def __init__(self, *models: dict[str, Any]) -> None:
        self.models = models
        self.port = 0

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": list(self.models)})


async def test_endpoints_say_what_they_serve_and_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PERIOD_S", 0.05)
    small = Engine({"id": "org/small"}, {"id": "small"}, {"id": "poems", "parent": "org/small"})
    same, other = Engine({"id": "org/small"}, {"id": "small"}), Engine({"id": "small"})
    for engine in (small, same, other):
        await engine.start()
    addresses = [address_of(f"127.0.0.1:{engine.port}") for engine in (small, same, other)]
    fleets = EndpointsDiscovery([*addresses, address_of("127.0.0.1:1=vllm")]).watch()
    try:
        fleet = await asyncio.wait_for(anext(fleets), 60)
        assert {model.id: model.served_names for model in fleet.models} == {
            "default/org.small": ["org/small", "small"],
            "default/small": ["small"],
        }
        assert [(adapter.model, adapter.served_names) for adapter in fleet.adapters] == [("default/org.small", ["poems"])]
        assert [(it.port, it.pool, it.ready, it.engine) for it in fleet.replicas] == [
            (small.port, "default/org.small/default", True, "auto"),
            (same.port, "default/org.small/default", True, "auto"),
            (other.port, "default/small/default", True, "auto"),
        ]
        await same.stop()
        fleet = await asyncio.wait_for(anext(fleets), 60)
        assert [it.ready for it in fleet.replicas] == [True, False, True]
        await same.start(same.port)
        fleet = await asyncio.wait_for(anext(fleets), 60)
        assert all(it.ready for it in fleet.replicas)
    finally:
        await fleets.aclose()  # type: ignore[attr-defined]
        for engine in (small, same, other):
            await engine.stop()


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--endpoint", "example.org:8000"], "'example.org' is not an IP address"),
        (["--endpoint", "10.0.0.1"], "'10.0.0.1' is not IP:PORT"),
        (["--endpoint", "10.0.0.1:8000=tgi"], "'tgi' is not an engine; there are penstock, vllm, sglang, trtllm, llamacpp, auto"),
        (["--endpoint", "10.0.0.1:8000", "--discovery", "file:x"], "not allowed with argument"),
        (["--endpoint", "10.0.0.1:8000", "--namespace", "n"], "--namespace and --endpoint exclude each other"),
        (["--log-level", "LOUD"], "invalid choice: 'LOUD'"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.gateway(flags)
    assert ended.value.code == 2
    assert fault in capsys.readouterr().err
