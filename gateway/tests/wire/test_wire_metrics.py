"""A real Envoy answers `/metrics` with what the dashboard shows, and nothing else of its admin interface."""

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from monitoring.boards.envoy import ENVOY

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def test_envoy_tells_prometheus_what_the_dashboard_shows_and_nobody_anything_else(
    tmp_path: Path, processes: Any, ports: Any, engine: Any, fleet_of: Any, client: aiohttp.ClientSession
) -> None:
    replica = (await engine("only")).replica()
    port, grpc_port, http_port, metrics = ports(4)
    (tmp_path / "fleet.json").write_bytes(msgspec.json.encode(fleet_of(replica)))
    known = ("--discovery", f"file:{tmp_path / 'fleet.json'}", "--grpc-port", str(grpc_port), "--http-port", str(http_port))
    processes.start("gateway", "gateway", *known, "--listener-host", "127.0.0.1", "--listener-port", str(port), "--name", "test")
    told = f"127.0.0.1:{metrics}"
    processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{grpc_port}", "--concurrency", "1", "--metrics", told)

    async def answered(method: str, path: str) -> tuple[int, str]:
        try:
            async with client.request(method, f"http://{told}{path}") as response:
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""  # not up yet

    async def asked() -> bool:
        try:
            async with client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=BODY) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    asked_for = " ".join(query.expr for panel in ENVOY.panels for query in panel.queries)
    needed = set(re.findall(r"\benvoy_(?:http|cluster|listener|server)_\w+(?=[{[)])", asked_for)) - {"envoy_cluster_name"}
    missing = needed
    async with asyncio.timeout(60):
        while missing:  # histograms come every five seconds
            await asked()
            _, text = await answered("GET", "/metrics")
            missing = {name for name in needed if f"\n{name}{{" not in text}
            await asyncio.sleep(0.2)
    assert len(needed) > 25
    clusters = set(re.findall(r'envoy_cluster_name="([^"]+)"', text))
    assert clusters == {"default/tiny/main", "penstock_gateway", "penstock_picker", "penstock_metrics"}
    assert "upstream_cx_rx_bytes" not in text, "what no panel shows is left out"
    for method, path in (
        ("POST", "/metrics"),
        ("GET", "/stats"),
        ("GET", "/"),
        ("POST", "/quitquitquit"),
        ("GET", "/config_dump"),
    ):
        assert (await answered(method, path))[0] == 404, path
    status, again = await answered("GET", "/metrics?usedonly&filter=nothing")
    assert status == 200 and "envoy_http_downstream_rq_total" in again, "a query changes nothing"
