"""Two real gateway processes, active and standby, under one real Envoy; and what is lost when a part dies under load."""

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from wire_waiting import eventually

from penstock.api import headers
from penstock.api.fleet import Fleet

pytestmark = pytest.mark.slow

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
PADDING = "x" * 60_000
PADDED = {"padding": PADDING}
MANY = 500


class Pair:
    """Gateways `active` and `standby`, an Envoy that knows both, and the fleet file before them."""

    def __init__(self, folder: Path, processes: Any, ports: Callable[[int], list[int]], gateways: int = 2) -> None:
        self.processes = processes
        self.fleet_file = folder / "fleet.json"
        self.port, self.admin_port, *free = ports(2 + 2 * gateways)
        self.grpc_ports, self.http_ports = free[:gateways], free[gateways:]
        self.url = f"http://127.0.0.1:{self.port}"
        self.gateways = [self.start_gateway(which) for which in range(gateways)]
        self.envoy: subprocess.Popen[bytes] = self.start_envoy()

    def start_gateway(self, which: int) -> Any:
        where = ("--grpc-port", str(self.grpc_ports[which]), "--http-port", str(self.http_ports[which]))
        listen = ("--listener-host", "127.0.0.1", "--listener-port", str(self.port))
        command = ("gateway", "--discovery", f"file:{self.fleet_file}", *where, *listen, "--name", f"gateway-{which}")
        return self.processes.start(f"gateway-{which}", *command)

    def start_envoy(self) -> Any:
        gateways = [word for port in self.grpc_ports for word in ("--gateway", f"127.0.0.1:{port}")]
        more = ("--admin-port", str(self.admin_port), "--concurrency", "1", "--node-id", "test", "--drain-delay", "0.5")
        return self.processes.start("envoy", "envoy", *gateways, *more)

    async def serve(self, fleet: Fleet) -> None:
        """Puts the fleet, and waits until every gateway and Envoy know it."""
        scratch = self.fleet_file.with_suffix(".new")
        scratch.write_bytes(msgspec.json.encode(fleet))
        scratch.replace(self.fleet_file)
        wanted = {(it.uid, it.ready) for it in fleet.replicas}
        for which in range(len(self.gateways)):
            if self.gateways[which].poll() is None:
                await eventually(lambda which=which: self._knows(which, wanted))
        await eventually(self.well)
        await eventually(self.answers)

    async def _knows(self, which: int, wanted: set[tuple[str, bool]]) -> bool:
        return wanted == {(it["uid"], it["ready"]) for pool in await self.pools(which) for it in pool["replicas"]}

    async def well(self) -> bool:
        """Envoy has found every gateway that runs ready, so that it asks the first of them."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.admin_port}/clusters") as response:
            text = await response.text()
        ports = [port for port, gateway in zip(self.grpc_ports, self.gateways, strict=True) if gateway.poll() is None]
        return all(f"penstock_picker::127.0.0.1:{port}::health_flags::healthy" in text for port in ports)

    async def pools(self, which: int) -> list[dict[str, Any]]:
        return (await self.ask(which, "/pools"))["pools"]

    async def ask(self, which: int, path: str) -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.http_ports[which]}{path}") as response,
        ):
            return await response.json() if response.content_type == "application/json" else await response.text()

    async def picks(self, which: int) -> int:
        text = await self.ask(which, "/metrics")
        return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith("penstock_picker_picks_total"))

    async def answers(self) -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/v1/models") as response:
            return response.status == 200

    def log(self) -> str:
        return self.processes.log("envoy")


@pytest.fixture
async def pair(tmp_path: Path, processes: Any, ports: Any, engine: Any, fleet_of: Any) -> AsyncIterator[tuple[Pair, list[Any]]]:
    its = Pair(tmp_path, processes, ports)
    engines = [await engine(name) for name in ("first", "second")]
    await its.serve(fleet_of(*(each.replica() for each in engines)))
    yield its, engines


async def ask(client: aiohttp.ClientSession, url: str, **fields: Any) -> str:
    """What became of a request: `ok`, or how it was lost."""
    try:
        async with client.post(url + PATH, json={**BODY, **fields}) as response:
            content = await response.read()
            if response.status != 200:
                return f"{response.status} {response.headers.get(headers.REASON)}"
            if fields.get("stream"):
                return "ok" if content.endswith(b"data: [DONE]\n\n") else "torn"
            return "ok" if json.loads(content)["choices"] else "empty"
    except aiohttp.ClientError as error:
        return type(error).__name__


async def load(
    client: aiohttp.ClientSession, url: str, stop: asyncio.Event, outcomes: Counter[str], fields: dict[str, Any]
) -> None:
    """Asks again and again until `stop`."""
    while not stop.is_set():
        outcomes[await ask(client, url, **fields)] += 1


async def under_load(
    client: aiohttp.ClientSession, url: str, during: Callable[[], Any], tasks: int = 8, **fields: Any
) -> Counter[str]:
    """What became of requests, one after the other on each of several connections, while `during` ran: of 60 kB, or with
    `fields`."""
    stop, outcomes = asyncio.Event(), Counter[str]()
    loads = [asyncio.create_task(load(client, url, stop, outcomes, fields or PADDED)) for _ in range(tasks)]
    await asyncio.sleep(0.3)
    try:
        await during()
    finally:
        stop.set()
        await asyncio.gather(*loads)
    return outcomes


async def test_the_active_gateway_picks_and_the_standby_is_warm(pair: Any, client: aiohttp.ClientSession) -> None:
    its, _ = pair
    assert {await ask(client, its.url) for _ in range(5)} == {"ok"}
    assert (await its.picks(0), await its.picks(1)) == (5, 0)
    for which in range(2):
        assert "ready" in await its.ask(which, "/readyz")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_no_answer_is_lost_when_the_active_gateway_goes(pair: Any, client: aiohttp.ClientSession, how: int) -> None:
    its, engines = pair
    for engine in engines:
        engine.pause_s, engine.chunks = 0.1, 30
    running = [asyncio.create_task(ask(client, its.url, stream=True)) for _ in range(20)]
    await eventually(lambda: all_there(engines, 20))
    await asyncio.sleep(0.3)  # their heads have passed

    async def goes() -> None:
        its.gateways[0].send_signal(how)
        await asyncio.to_thread(its.gateways[0].wait)
        await eventually(lambda: picks_at_least(its, 1, 50))

    outcomes = await under_load(client, its.url, goes)
    streams = Counter(await asyncio.gather(*running))
    print(f"{how!r}: requests {dict(outcomes)}, streams {dict(streams)}")
    assert set(streams) == {"ok"}
    assert set(outcomes) == {"ok"}


async def test_the_ends_of_streams_go_where_picks_go(pair: Any, client: aiohttp.ClientSession) -> None:
    its, _ = pair

    async def stops() -> None:
        its.gateways[0].send_signal(signal.SIGTERM)
        await asyncio.to_thread(its.gateways[0].wait)
        await eventually(lambda: picks_at_least(its, 1, MANY))

    assert set(await under_load(client, its.url, stops, stream=True)) == {"ok"}
    await eventually(lambda: few_are_left(its, 1))
    its.gateways[0] = its.start_gateway(0)
    await eventually(its.well)
    await under_load(client, its.url, lambda: eventually(lambda: picks_at_least(its, 0, MANY)), stream=True)
    await eventually(lambda: few_are_left(its, 0))


async def few_are_left(pair: Pair, which: int) -> bool:
    """Whether Envoy has told a gateway of most ends of what it has picked. Those that were on their way to another are lost."""
    lines = (await pair.ask(which, "/metrics")).splitlines()
    left = sum(float(line.split()[-1]) for line in lines if line.startswith("penstock_picker_bookings{"))
    return left < MANY / 4


async def picks_at_least(pair: Pair, which: int, count: int) -> bool:
    return await pair.picks(which) >= count


@pytest.mark.parametrize(
    ("how", "gone"), [(signal.SIGTERM, 1), (signal.SIGKILL, 1), (signal.SIGKILL, 2)], ids=["stopped", "killed", "both killed"]
)
async def test_an_answer_that_is_not_streamed_outlives_the_gateway_that_picked(
    pair: Any, client: aiohttp.ClientSession, how: int, gone: int
) -> None:
    its, engines = pair
    for engine in engines:
        engine.go_on.clear()

    async def think() -> tuple[int, bool, bool]:
        async with client.post(its.url + PATH, json=BODY, headers={headers.LOAD_FORMAT: "TEXT"}) as response:
            answered_by = f"uid-{(await response.json())['id']}"
            told = (response.headers.get(headers.REPLICA), response.headers.get(headers.MODEL))
            return response.status, told == (answered_by, "tiny"), headers.LOAD in response.headers

    thinking = [asyncio.create_task(think()) for _ in range(10)]
    await eventually(lambda: all_there(engines, 10))
    for gateway in its.gateways[:gone]:
        gateway.send_signal(how)
        await asyncio.to_thread(gateway.wait, 60)
    for engine in engines:
        engine.go_on.set()
    # Envoy knows who has answered, whoever is left to be told of it.
    assert Counter(await asyncio.gather(*thinking)) == {(200, True, False): 10}
    assert sum(len(engine.requests) for engine in engines) == 10, "and was computed once"


async def test_with_a_standby_bookings_live_from_pick_to_response(pair: Any, client: aiohttp.ClientSession) -> None:
    its, engines = pair
    for engine in engines:
        engine.go_on.clear()
    asking = [asyncio.create_task(ask(client, its.url)) for _ in range(6)]
    await eventually(lambda: bookings_are(its, pending=6))
    asking.append(asyncio.create_task(ask(client, its.url)))
    await eventually(lambda: bookings_are(its, pending=7))
    asking.pop().cancel()  # a client that gives up before the response
    await eventually(lambda: released(its, "access_log", 1))
    for engine in engines:
        engine.go_on.set()
    assert Counter(await asyncio.gather(*asking)) == {"ok": 6}
    await eventually(lambda: bookings_are(its))
    await eventually(lambda: released(its, "answered", 6))
    async with client.post(its.url + PATH, json=BODY, headers={headers.DECISION: "explain"}) as response:
        assert response.headers[headers.DECISION] and response.headers[headers.MODEL] == "tiny"


async def bookings_are(pair: Pair, **counts: int) -> bool:
    text = await pair.ask(0, "/metrics")
    states = ("pending", "unreported", "running")
    return all(f'penstock_picker_bookings{{state="{it}"}} {counts.get(it, 0):.1f}' in text for it in states)


async def released(pair: Pair, by: str, at_least: int, which: int = 0) -> bool:
    prefix = f'penstock_picker_booking_released_total{{by="{by}"}} '
    lines = (await pair.ask(which, "/metrics")).splitlines()
    return sum(float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)) >= at_least


async def all_there(engines: list[Any], count: int) -> bool:
    return sum(len(engine.requests) for engine in engines) >= count


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_what_the_active_gateway_holds_the_standby_takes_over(
    pair: Any, client: aiohttp.ClientSession, fleet_of: Any, how: int
) -> None:
    its, (first, _) = pair
    await its.serve(fleet_of(first.replica(ready=False), hold_timeout_s=120))
    small = [asyncio.create_task(ask(client, its.url, padding=PADDING)) for _ in range(20)]
    large = [asyncio.create_task(ask(client, its.url, padding="x" * 200_000)) for _ in range(3)]
    await eventually(lambda: holds(its, 0, 23))
    its.gateways[0].send_signal(how)
    await eventually(lambda: holds(its, 1, 20))
    lost = Counter(await asyncio.gather(*large))
    await asyncio.to_thread(its.gateways[0].wait, 60)
    await its.serve(fleet_of(first.replica(), hold_timeout_s=120))
    outcomes = Counter(await asyncio.gather(*small))
    print(f"{how!r}: held bodies of 60 kB {dict(outcomes)}, of 200 kB {dict(lost)}")
    assert outcomes == {"ok": 20}
    assert lost == {"503 gateway_unavailable": 3}


async def holds(pair: Pair, which: int, count: int) -> bool:
    return sum(pool["held"] for pool in await pair.pools(which)) == count


async def test_an_envoy_that_is_stopped_lets_what_runs_end_and_takes_nothing_new(
    pair: Any, client: aiohttp.ClientSession
) -> None:
    its, engines = pair
    for engine in engines:
        engine.go_on.clear()
    running = [asyncio.create_task(ask(client, its.url, stream=True)) for _ in range(10)]
    await eventually(lambda: all_there(engines, 10))
    its.envoy.send_signal(signal.SIGTERM)

    async def refuses() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", its.port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    await eventually(refuses)
    assert not any(task.done() for task in running)
    for engine in engines:
        engine.go_on.set()
    assert Counter(await asyncio.gather(*running)) == {"ok": 10}
    assert await asyncio.to_thread(its.envoy.wait, 60) == 0


async def test_an_envoy_that_is_killed_is_back_as_soon_as_it_starts(pair: Any, client: aiohttp.ClientSession) -> None:
    its, engines = pair
    for engine in engines:
        engine.pause_s, engine.chunks = 0.1, 30
    torn = [asyncio.create_task(ask(client, its.url, stream=True)) for _ in range(4)]
    await eventually(lambda: all_there(engines, 4))
    its.envoy.kill()
    its.envoy.wait()
    assert "ok" not in await asyncio.gather(*torn)
    for engine in engines:
        engine.pause_s = 0.0

    async def starts() -> bool:  # its port is free as soon as the process that had it is gone
        if its.envoy.poll() is not None:
            its.envoy = its.start_envoy()
        return await its.answers()

    await eventually(starts)
    await eventually(its.well)
    assert {await ask(client, its.url, stream=stream) for stream in (False, True) * 5} == {"ok"}
    assert await its.picks(1) == 0, "the first gateway is still the one that is asked"
    await eventually(lambda: released(its, "access_log", 5))


async def test_a_gateway_that_is_back_hears_of_ends_again(pair: Any, client: aiohttp.ClientSession) -> None:
    its, _ = pair
    its.gateways[0].kill()
    its.gateways[0].wait()

    async def streams(which: int) -> bool:  # and Envoy's log goes to whom it has last
        return await ask(client, its.url, stream=True) == "ok" and await released(its, "access_log", 1, which)

    await eventually(lambda: streams(1))
    its.gateways[0] = its.start_gateway(0)
    await eventually(its.well)
    await eventually(lambda: streams(0))
    assert await its.picks(0) >= 1


async def test_nothing_is_left_of_an_envoy_whose_command_is_killed(processes: Any, ports: Any) -> None:
    gateway, admin = ports(2)
    more = ("--admin-port", str(admin), "--concurrency", "1", "--node-id", "test")
    command = processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{gateway}", *more)

    async def admin_answers() -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{admin}/ready"):
            return True

    await eventually(admin_answers)
    command.kill()

    async def gone() -> bool:
        try:
            return not await admin_answers()
        except aiohttp.ClientConnectorError:
            return True

    await eventually(gone)


async def test_what_a_gateway_that_hangs_holds_goes_to_the_standby(pair: tuple[Pair, list[Any]], client: Any) -> None:
    its, _ = pair
    standby = await its.picks(1)
    its.gateways[0].send_signal(signal.SIGSTOP)  # its sockets stay open, and take what they are sent
    try:
        asked = [asyncio.create_task(ask(client, its.url)) for _ in range(8)]
        async with asyncio.timeout(60):
            assert Counter(await asyncio.gather(*asked)) == {"ok": 8}
        assert await its.picks(1) - standby == 8
    finally:
        its.gateways[0].send_signal(signal.SIGCONT)
