"""Two real gateways and a real engine under load: what one knows of the load the other knows soon."""

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from wire_waiting import eventually

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[3] / "examples" / "models" / "penstock-tiny"
AGREED_S = 0.2


async def test_two_gateways_agree_on_the_load(
    tmp_path: Path, processes: Any, ports: Any, engine: Any, fleet_of: Any, client: aiohttp.ClientSession
) -> None:
    pytest.importorskip("torch")
    port, events_port, replay_port, listener, admin, *its = ports(9)
    grpc_ports, http_ports = its[:2], its[2:]
    serve = ("--port", str(port), "--events-port", str(events_port), "--replay-port", str(replay_port))
    memory = ("--served-model-name", "tiny", "--kv-cache-memory-bytes", str(16 * 2**20))
    processes.start("engine", "serve", str(TINY), *serve, *memory)
    replica = (await engine("stand-in")).replica(port=port, events_port=events_port, replay_port=replay_port)
    (tmp_path / "fleet.json").write_bytes(msgspec.json.encode(fleet_of(replica)))
    for which in range(2):
        where = ("--grpc-port", str(grpc_ports[which]), "--http-port", str(http_ports[which]), "--name", f"gateway-{which}")
        listen = ("--listener-host", "127.0.0.1", "--listener-port", str(listener))
        processes.start(f"gateway-{which}", "gateway", "--discovery", f"file:{tmp_path / 'fleet.json'}", *where, *listen)
    known = [word for grpc_port in grpc_ports for word in ("--gateway", f"127.0.0.1:{grpc_port}")]
    processes.start("envoy", "envoy", *known, "--admin-port", str(admin), "--concurrency", "1", "--node-id", "test")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "ignore_eos": True}

    async def ask() -> bool:
        async with client.post(f"http://127.0.0.1:{listener}/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status == 200

    async def report(which: int) -> dict[str, Any] | None:
        async with client.get(f"http://127.0.0.1:{http_ports[which]}/pools") as response:
            return (await response.json())["pools"][0]["replicas"][0]["report"]

    async def both_know() -> bool:
        return all([await report(which) for which in range(2)])

    await eventually(ask, 120)
    await eventually(both_know, 120)
    async with asyncio.timeout(120):
        while not await agree(ask, report):
            pass  # the machine may have been busy with something else: they must come to agree, and not at once


async def agree(ask: Any, report: Any) -> bool:
    """Whether, in four seconds of load, each knew half of what the other came to know soon after it."""
    seen: list[list[tuple[int, float]]] = [[], []]
    ran = set[int]()
    over = asyncio.Event()

    async def load() -> None:
        while not over.is_set():
            assert await ask()

    async def watch(which: int) -> None:
        while not over.is_set():
            its = await report(which)
            assert its is not None
            ran.add(its["num_requests_running"])
            if not seen[which] or its["seq"] > seen[which][-1][0]:
                seen[which].append((its["seq"], time.monotonic()))
            await asyncio.sleep(0.02)

    tasks = [*(asyncio.create_task(load()) for _ in range(4)), *(asyncio.create_task(watch(which)) for which in range(2))]
    await asyncio.sleep(4)
    over.set()
    await asyncio.gather(*tasks)
    medians = []
    for name, one, other in (("standby", *seen), ("active", *seen[::-1])):
        lags = [lag for seq, at in one if (lag := behind(other, seq, at)) is not None]
        if max(ran) < 2 or len(lags) <= 10:
            return False  # it was not under load
        ninth = statistics.quantiles(lags, n=10)[-1]
        print(f"{len(lags)} reports; nine of ten the {name} knew within {ninth * 1e3:.0f} ms of the other")
        medians.append(statistics.median(lags))
    return max(medians) <= AGREED_S


def behind(other: list[tuple[int, float]], seq: int, at: float) -> float | None:
    """How much later than `at` the other knew a report as new as `seq`; None where it was not seen to."""
    return next((max(its_at - at, 0.0) for its_seq, its_at in other if its_seq >= seq), None)
