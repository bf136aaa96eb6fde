"""A fixed fleet by `--endpoint`, through a real Envoy."""

import asyncio
from typing import Any

import aiohttp


async def test_a_fleet_of_two_addresses_serves_what_they_say(
    processes: Any, ports: Any, engine: Any, client: aiohttp.ClientSession
) -> None:
    one, two = await engine("one"), await engine("two")
    port, grpc_port, http_port = ports(3)
    where = ("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--listener-port", str(port))
    flags = ("--endpoint", one.endpoint, "--endpoint", two.endpoint, "--log-level", "WARNING")
    processes.start("gateway", "gateway", *flags, *where, "--listener-host", "127.0.0.1")
    processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{grpc_port}", "--concurrency", "1", "--node-id", "test")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    one.think_s = two.think_s = 0.2

    async def ask() -> str:
        async with client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as response:
            return (await response.json())["id"] if response.status == 200 else ""

    answered: set[str | BaseException] = set()
    async with asyncio.timeout(30):
        while not {"one", "two"} <= answered:  # not up yet
            answered.update(await asyncio.gather(*(ask() for _ in range(8)), return_exceptions=True))
            await asyncio.sleep(0.02)
    assert " INFO " not in processes.log("gateway")
