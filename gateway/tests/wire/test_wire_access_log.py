"""A real Envoy tells a real gateway of the ends that engines say nothing of, also after a gateway that came anew."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from penstock.api.fleet import Fleet

BODY = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
ENDED = 'penstock_picker_booking_released_total{by="access_log"}'


class Silent:
    """A gateway and an Envoy before engines whose event streams nobody serves."""

    def __init__(self, folder: Path, processes: Any, ports: Callable[[int], list[int]], ext_proc: str, fleet: Fleet) -> None:
        self.processes = processes
        self.port, self.grpc_port, self.http_port = ports(3)
        (folder / "fleet.json").write_bytes(msgspec.json.encode(fleet))
        where = ("--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port), "--ext-proc", ext_proc)
        listen = ("--listener-host", "127.0.0.1", "--listener-port", str(self.port))
        self.command = ("gateway", "--discovery", f"file:{folder / 'fleet.json'}", *where, *listen, "--name", "test")
        self.gateway = processes.start("gateway", *self.command)
        processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{self.grpc_port}", "--concurrency", "1", "--node-id", "test")

    async def stream(self, client: aiohttp.ClientSession) -> int:
        async with client.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=BODY) as response:
            await response.read()
            return response.status

    async def answers(self, client: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    if await self.stream(client) == 200:
                        return
                except aiohttp.ClientError:
                    pass  # not up yet
                await asyncio.sleep(0.05)

    async def tells(self, client: aiohttp.ClientSession) -> bool:
        """Asks; whether Envoy has told the gateway of an end."""
        try:
            return await self.stream(client) == 200 and (await self.metrics(client)).get(ENDED, 0.0) > 0
        except aiohttp.ClientError:
            return False  # not up yet

    async def metrics(self, client: aiohttp.ClientSession) -> dict[str, float]:
        async with client.get(f"http://127.0.0.1:{self.http_port}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for line in lines if line[0] != "#" for name, value in [line.rsplit(" ", 1)]}


async def bookings(its: Silent, client: aiohttp.ClientSession) -> tuple[float, float]:
    """Those that are open, and how many ends Envoy has told."""
    now = await its.metrics(client)
    left = sum(now[f'penstock_picker_bookings{{state="{state}"}}'] for state in ("pending", "unreported", "running"))
    return left, now.get(ENDED, 0.0)


async def all_ended(its: Silent, client: aiohttp.ClientSession, before: tuple[float, float], count: int) -> None:
    """So many more ends were told than `before`, and no more bookings are open than then."""
    async with asyncio.timeout(60):
        while True:
            left, ended = await bookings(its, client)
            if left <= before[0] and ended >= before[1] + count:
                return
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["lean", "lean in Python", "grpc"])
async def test_the_end_of_a_stream_ends_its_booking(
    tmp_path: Path,
    processes: Any,
    in_python: Any,
    ports: Any,
    engine: Any,
    fleet_of: Any,
    client: aiohttp.ClientSession,
    front_end: str,
) -> None:
    only = await engine("only")
    ext_proc, _, form = front_end.partition(" in ")
    processes.environment = in_python() if form else {}
    its = Silent(tmp_path, processes, ports, ext_proc, fleet_of(only.replica()))
    await its.answers(client)
    async with asyncio.timeout(60):
        # What ends before Envoy's log has found the gateway is told to nobody.
        while not await its.tells(client):
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)  # what was told of the last of these has come
    before = await bookings(its, client)
    for _ in range(5):
        assert await its.stream(client) == 200
    await all_ended(its, client, before, 5)
    only.go_on.clear()
    async with client.post(f"http://127.0.0.1:{its.port}/v1/chat/completions", json=BODY) as response:
        assert (await response.content.readline()).startswith(b"data: ")
        response.close()  # given up before it ends
    await all_ended(its, client, before, 6)
    only.go_on.set()
    its.gateway.send_signal(signal.SIGKILL)
    its.gateway.wait()
    its.gateway = processes.start("gateway", *its.command)
    async with asyncio.timeout(60):
        while not await its.tells(client):
            await asyncio.sleep(0.05)
