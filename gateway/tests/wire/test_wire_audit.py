"""A real Envoy before a real gateway with an audit log: every request has its line, and secrets are in none."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson

TENANTS = "tenants: [{name: search, keys: [SECRET-key-of-search]}]"
KEY = {"authorization": "Bearer SECRET-key-of-search"}
ODD = {"cookie": "SECRET", "x-unknown": "SECRET", "user-agent": "SECRET", "x-penstock-tenant": "SECRET", "x-request-id": "SECRET"}


async def test_requests_through_envoy_are_told_with_their_bytes_and_without_their_words(
    tmp_path: Path, processes: Any, ports: Any, engine: Any, fleet_of: Any, client: aiohttp.ClientSession
) -> None:
    only = await engine("only")
    port, grpc_port, http_port = ports(3)
    audit = tmp_path / "audit.log"
    (tmp_path / "fleet.json").write_bytes(msgspec.json.encode(fleet_of(only.replica())))
    (tmp_path / "tenants.yaml").write_text(TENANTS)
    where = ("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--listener-port", str(port))
    says = ("--tenants", str(tmp_path / "tenants.yaml"), "--audit-log", str(audit), "--name", "gw")
    found = f"file:{tmp_path / 'fleet.json'}"
    processes.start("gateway", "gateway", "--discovery", found, *where, "--listener-host", "127.0.0.1", *says)
    processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{grpc_port}", "--concurrency", "1", "--node-id", "test")
    url = f"http://127.0.0.1:{port}/v1/chat/completions?q=SECRET"

    async def ask(key: dict[str, str], **fields: Any) -> tuple[int, int]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "SECRET"}], **fields}
        async with client.post(url, json=body, headers={**ODD, **key}) as response:
            return response.status, len(await response.read())

    async with asyncio.timeout(60):
        while True:
            try:
                if (await ask({}))[0] == 401:
                    break
            except aiohttp.ClientError:
                pass  # not up yet
            await asyncio.sleep(0.05)
    status, size = await ask(KEY, stream=True)
    assert status == 200
    only.go_on.clear()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "SECRET"}], "stream": True}
    async with client.post(url, json=body, headers={**ODD, **KEY}) as response:
        assert (await response.content.readline()).startswith(b"data: ")
        response.close()  # given up before its end
    only.go_on.set()
    assert (await ask(KEY, model="SECRET"))[0] == 404

    lines: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while sum(line["reason"] is None for line in lines) < 2 or not any(line["status"] == 404 for line in lines):
            lines = [orjson.loads(line) for line in audit.read_bytes().splitlines()]
            await asyncio.sleep(0.1)
    assert b"SECRET" not in audit.read_bytes()
    whole, torn = (line for line in lines if line["reason"] is None)
    assert (whole["status"], whole["tenant"], whole["model"], whole["replica"]) == (200, "search", "default/tiny", "only")
    assert (whole["bytes_sent"], whole["ended_by"]) == (size, "access_log")
    assert whole["ttft_ms"] <= whole["duration_ms"] and len(whole["request_id"]) == 36, "Envoy's own id"
    assert torn["bytes_sent"] < size
    assert {line["reason"] for line in lines if line["status"] in (401, 404)} == {"missing_api_key", "model_not_found"}
    assert "SECRET" not in processes.log("envoy"), "nor in Envoy's log, which is the other one"
