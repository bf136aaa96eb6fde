"""A crowd through a real Envoy: a thousand streams at once, of which a third leaves, while held or while answered."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from penstock.api import events, headers, metrics
from penstock.api.events import EventBatch, RequestFinished
from penstock.api.fleet import Fleet

pytestmark = pytest.mark.slow

STREAMS, CHUNKS, PAUSE_S = 1_000, 4, 0.5
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Publishing:
    """An engine that says on its event stream when a request has left it, however it left."""

    def __init__(self, port: int, events_port: int) -> None:
        self.port, self.events_port = port, events_port
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.socket.bind(f"tcp://127.0.0.1:{events_port}")
        self.ended: set[str] = set()
        self._seq = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        name = request.headers[headers.REQUEST_ID]
        try:
            await request.read()
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for n in range(CHUNKS):
                await response.write(b'data: {"n": %d}\n\n' % n)
                await asyncio.sleep(PAUSE_S)
            return response
        finally:
            await self.say(name)

    async def say(self, name: str) -> None:
        self.ended.add(name)
        batch = EventBatch(epoch=1, time=time.time(), events=[RequestFinished(name, "stop", 1, 0, CHUNKS)])
        await self.socket.send_multipart([events.TOPIC, events.encode_seq(self._seq), events.encode(batch)])
        self._seq += 1


@pytest.fixture
async def publishing(ports: Callable[[int], list[int]]) -> AsyncIterator[Publishing]:
    engine = Publishing(*ports(2))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", engine.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", engine.port, backlog=2048).start()
    yield engine
    await runner.cleanup()
    engine.context.destroy(linger=0)


class Gateway:
    """A gateway and an Envoy, with a fleet in a file."""

    def __init__(self, folder: Path, processes: Any, ports: Callable[[int], list[int]], ext_proc: str) -> None:
        self.file = folder / "fleet.json"
        self.port, grpc_port, self.http_port = ports(3)
        where = ("--grpc-port", str(grpc_port), "--http-port", str(self.http_port), "--ext-proc", ext_proc)
        listen = ("--listener-host", "127.0.0.1", "--listener-port", str(self.port))
        self.put(Fleet())
        processes.start("gateway", "gateway", "--discovery", f"file:{self.file}", *where, *listen)
        processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{grpc_port}", "--concurrency", "1", "--node-id", "crowd")

    def put(self, fleet: Fleet) -> None:
        scratch = self.file.with_suffix(".new")
        scratch.write_bytes(msgspec.json.encode(fleet))
        scratch.replace(self.file)

    async def metrics(self, client: aiohttp.ClientSession) -> dict[str, float]:
        """Samples by name and labels."""
        async with client.get(f"http://127.0.0.1:{self.http_port}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        return {f"{it.name}:{','.join(it.labels.values())}": it.value for family in families for it in family.samples}


async def ready(gateway: Gateway, client: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with client.get(f"http://127.0.0.1:{gateway.port}/v1/models") as response:
                    if response.status == 200 and (await response.json())["data"]:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def ask(url: str, client: aiohttp.ClientSession, number: int, counts: dict[str, int]) -> None:
    """Every third leaves after the first event; the others read to the end."""
    async with client.post(url, json=BODY) as response:
        assert response.status == 200, await response.text()
        await response.content.readline()
        if number % 3 == 0:
            response.close()
            counts["left"] += 1
            return
        rest = await response.content.read()
        assert rest.count(b"data:") == CHUNKS - 1
        counts["read"] += 1


async def test_a_crowd_of_which_a_third_leaves_leaves_nothing(
    tmp_path: Path, processes: Any, ports: Callable[[int], list[int]], publishing: Publishing, engine: Any, fleet_of: Any
) -> None:
    gateway = Gateway(tmp_path, processes, ports, "lean")
    url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
    template = await engine("template")
    replica = template.replica(port=publishing.port, events_port=publishing.events_port)
    gateway.put(fleet_of(hold_timeout_s=120.0))
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
        await ready(gateway, client)
        held = [asyncio.create_task(client.post(url, json=BODY)) for _ in range(90)]
        gauge = f"{metrics.REQUESTS_HELD}:default/tiny"
        async with asyncio.timeout(60):
            while (await gateway.metrics(client)).get(gauge) != 90:
                await asyncio.sleep(0.05)
            for task in held[::3]:
                task.cancel()
            while (await gateway.metrics(client)).get(gauge) != 60:
                await asyncio.sleep(0.05)
        gateway.put(fleet_of(replica, hold_timeout_s=120.0))
        for task in held:
            if not task.cancelled() and not task.cancelling():
                (await task).close()
        counts = {"left": 0, "read": 0}
        await asyncio.gather(*(ask(url, client, number, counts) for number in range(STREAMS)))
        assert counts == {"left": 334, "read": 666}
        async with asyncio.timeout(60):
            while True:
                now = await gateway.metrics(client)
                if all(now[f"{metrics.BOOKINGS_OPEN}:{state}"] == 0 for state in ("pending", "unreported", "running")):
                    break
                await asyncio.sleep(0.1)
        ended = {name: value for name, value in now.items() if name.startswith(metrics.BOOKINGS_RELEASED)}
        assert sum(ended.values()) == STREAMS + 60
        assert not any(name.endswith(":expired") for name in ended)
