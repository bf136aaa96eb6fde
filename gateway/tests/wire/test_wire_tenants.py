"""Tenants and flow control through a real Envoy, read by OpenAI's own client."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from aiohttp import web

from penstock.api import headers, load_report
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from testing import patient

ROWS = 4
TENANTS = """
tenants:
  - {name: heavy, keys: [sk-heavy-001], weight: 3}
  - {name: light, keys: [sk-light-001], weight: 1}
  - {name: strict, keys: [sk-strict-01], requestsPerMinute: 1}
  - {name: tight, keys: [sk-tight-001], maxQueued: 1}
  - {name: urgent, keys: [sk-urgent-01], priority: -5}
"""
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}]}


@dataclass
class Rows:
    """An engine of so many rows that says how loaded it is."""

    port: int
    seconds: float = 0.05
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    waiting: int = 0
    most_waiting: int = 0
    seq: int = 0
    served: list[str] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    gone: int = 0

    def __post_init__(self) -> None:
        self.rows = asyncio.Semaphore(ROWS)
        self.gate.set()

    def report(self) -> LoadReport:
        self.seq += 1
        waits = {"capacity": self.waiting} if self.waiting else {}
        return LoadReport(
            epoch=1,
            seq=self.seq,
            max_num_seqs=ROWS,
            num_requests_running=self.running,
            num_requests_waiting=waits,  # type: ignore[arg-type]
        )

    async def load(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.report()))

    async def complete(self, request: web.Request) -> web.Response:
        await request.read()
        self.heads.append({name.lower(): value for name, value in request.headers.items()})
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting - (ROWS - self.running))
        taken = False
        try:
            async with self.rows:
                self.waiting -= 1
                taken = True
                self.running += 1
                try:
                    self.served.append(request.headers.get(headers.TENANT, ""))
                    await self.gate.wait()
                    await asyncio.sleep(self.seconds)
                finally:
                    self.running -= 1
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.waiting -= not taken
        message = {"role": "assistant", "content": "hello"}
        body = {"id": "x", "object": "chat.completion", "created": 1, "model": "tiny"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response({**body, "choices": [choice]}, headers={headers.LOAD: load_report.encode(self.report(), "TEXT")})


class Site:
    """A gateway with tenants, an Envoy, and engines."""

    def __init__(self, folder: Path, processes: Any, ports: Callable[[int], list[int]]) -> None:
        self.processes = processes
        self.port, grpc, self.http_port, *self.engine_ports = ports(5)
        self.fleet_file, tenants = folder / "fleet.json", folder / "tenants.yaml"
        tenants.write_text(TENANTS)
        self.put([])
        where = ("--grpc-port", str(grpc), "--http-port", str(self.http_port), "--tenants", str(tenants))
        listen = ("--listener-host", "127.0.0.1", "--listener-port", str(self.port), "--discovery", f"file:{self.fleet_file}")
        processes.start("gateway", "gateway", *where, *listen)
        processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{grpc}", "--concurrency", "1", "--node-id", "test")
        self.engines: list[Rows] = []

    def put(self, ready: list[int], hold_s: float = 60.0) -> None:
        """The fleet, with the replicas on these ports."""
        model = Model(id="default/tiny", served_names=["tiny"], policy="LeastRequest", hold_timeout_s=hold_s)
        pool = Pool(id="default/tiny/main", model=model.id)
        replicas = [
            Replica(
                uid=f"u{port}", name=f"r{port}", pool=pool.id, host="127.0.0.1", port=port,
                events_port=1, replay_port=2, ready=True,
            )
            for port in ready
        ]  # fmt: skip
        scratch = self.fleet_file.with_suffix(".new")
        scratch.write_bytes(msgspec.json.encode(Fleet(models=[model], pools=[pool], replicas=replicas)))
        scratch.replace(self.fleet_file)

    def client(self, key: str, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, **more)

    async def pools(self) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=patient.LIMIT_S) as http:
            return (await http.get(f"http://127.0.0.1:{self.http_port}/pools")).json()["pools"][0]

    async def until_empty(self) -> None:
        async with asyncio.timeout(60):
            while (await self.pools())["replicas"]:
                await asyncio.sleep(0.02)

    async def until_held(self, count: int) -> None:
        async with asyncio.timeout(60):
            while (await self.pools())["held"] != count:
                await asyncio.sleep(0.02)

    async def until_heard(self, count: int) -> None:
        async with asyncio.timeout(60):
            while sum(it["report"] is not None for it in (await self.pools())["replicas"]) != count:
                await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, make_processes: Any, ports: Any) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("tenants")
    processes = make_processes(folder)
    try:
        yield Site(folder, processes, ports)
    finally:
        processes.stop()


@pytest.fixture
async def site(stack: Site) -> AsyncIterator[Site]:
    site, stack.engines = stack, []
    runners = []
    for port in site.engine_ports:
        engine = Rows(port)
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", engine.complete), web.get("/load", engine.load)])
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        runners.append(runner)
        site.engines.append(engine)
    async with asyncio.timeout(60), httpx.AsyncClient(timeout=patient.LIMIT_S) as http:
        while True:
            try:
                if (await http.get(f"http://127.0.0.1:{site.port}/v1/models")).status_code == 401:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
    yield site
    site.put([])
    await site.until_empty()
    for runner in runners:
        await runner.cleanup()


async def test_what_is_forged_is_removed_and_what_is_wrong_is_refused_as_openai_would(site: Site) -> None:
    engine = site.engines[0]
    site.put([engine.port])
    await site.until_heard(1)
    forged = {
        headers.TENANT: "urgent", headers.PRIORITY: "-100", headers.POOL: "default/other/main",
        headers.DESTINATION: "127.0.0.1:1", headers.SUBSET: "127.0.0.1:1", headers.DESTINATION_SERVED: "127.0.0.1:1",
        "x-api-key": "sk-light-001",
    }  # fmt: skip
    async with site.client("sk-heavy-001") as client:
        assert (await client.chat.completions.create(**BODY, extra_headers=forged)).choices[0].message.content == "hello"
        head = engine.heads[-1]
        assert (head[headers.TENANT], head[headers.PRIORITY]) == ("heavy", "0")
        assert not {"authorization", "x-api-key", headers.SUBSET, headers.DESTINATION_SERVED} & head.keys()
        with pytest.raises(openai.BadRequestError, match="priority -1 is more than yours"):
            await client.chat.completions.create(**BODY, extra_body={"priority": -1})
    async with site.client("sk-unknown-1") as client:
        with pytest.raises(openai.AuthenticationError, match="not one that is known"):
            await client.chat.completions.create(**BODY)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with site.client("sk-strict-01") as client:
        await client.chat.completions.create(**BODY)
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(**BODY)
    assert limited.value.code == "rate_limit_exceeded"
    assert limited.value.response.headers[headers.REASON] == "requests_per_minute"
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60


@pytest.mark.req("RT-41")
async def test_a_saturated_pool_answers_429_and_503_and_who_leaves_frees_a_place(site: Site) -> None:
    engine = site.engines[0]
    site.put([engine.port])
    await site.until_heard(1)
    engine.gate.clear()
    async with site.client("sk-light-001") as light, site.client("sk-tight-001") as tight:
        running = [asyncio.create_task(light.chat.completions.create(**BODY)) for _ in range(ROWS + 1)]
        async with asyncio.timeout(60):
            while len(engine.heads) < ROWS + 1:
                await asyncio.sleep(0.02)
        held = asyncio.create_task(tight.chat.completions.create(**BODY))
        await site.until_held(1)
        with pytest.raises(openai.RateLimitError) as full:
            await tight.chat.completions.create(**BODY)
        assert full.value.response.headers[headers.REASON] == "tenant_queue_full"
        assert int(full.value.response.headers["retry-after"]) >= 1
        held.cancel()
        await site.until_held(0)
        again = asyncio.create_task(tight.chat.completions.create(**BODY))
        await site.until_held(1)
        with pytest.raises(openai.InternalServerError) as late:
            await light.chat.completions.create(**BODY, extra_headers={headers.TIMEOUT: "200"})
        assert (late.value.status_code, late.value.code) == (503, "deadline_exceeded")
        assert int(late.value.response.headers["retry-after"]) >= 1
        engine.gate.set()
        await asyncio.gather(*running, again)
    assert engine.most_waiting <= 2


@pytest.mark.req("LIM-04")
async def test_tenants_get_shares_by_weight_and_the_urgent_goes_first(site: Site) -> None:
    engine = site.engines[0]
    engine.seconds = 0.02
    site.put([engine.port])
    await site.until_heard(1)
    engine.gate.clear()
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(limits=limits, timeout=60) as http:
        clients = {name: site.client(f"sk-{name}-001", http_client=http) for name in ("light", "heavy")}

        async def ask(client: openai.AsyncOpenAI, count: int) -> list[asyncio.Task[Any]]:
            return [asyncio.create_task(client.chat.completions.create(**BODY)) for _ in range(count)]

        tasks = await ask(clients["light"], 65)
        await site.until_held(60)  # four run, one waits there
        tasks += await ask(clients["heavy"], 40)
        await site.until_held(100)
        tasks += await ask(site.client("sk-urgent-01", http_client=http), 3)
        await site.until_held(103)
        engine.gate.set()
        answers = await asyncio.gather(*tasks)
    assert len(answers) == 108
    order = engine.served[5:]
    assert order[:5].count("urgent") == 3, "those that go on at one moment may overtake one another on their way to the engine"
    shares = Counter([name for name in order if name != "urgent"][:40])
    assert shares["heavy"] == pytest.approx(30, abs=4)


@pytest.mark.slow
async def test_a_hundred_requests_are_held_from_zero_and_none_is_lost(site: Site) -> None:
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=200), timeout=60) as http:
        client = site.client("sk-light-001", http_client=http)
        tasks = [asyncio.create_task(client.chat.completions.create(**BODY)) for _ in range(100)]
        await site.until_held(100)
        site.put([site.engines[0].port])
        async with asyncio.timeout(60):
            while not site.engines[0].served:
                await asyncio.sleep(0.02)
        site.put([engine.port for engine in site.engines])
        answers = await asyncio.gather(*tasks)
    assert len(answers) == 100
    shares = [len(engine.served) for engine in site.engines]
    assert sum(shares) == 100 and min(shares) >= 20
    # Eight while nothing had been heard of it, then no more than its own short queue.
    assert all(engine.most_waiting <= 8 for engine in site.engines)
