"""What the picker's knowledge of caches costs: the index in memory and time, prompts by first and next turn, 100 idle replicas.

    make bench-residency

CPU seconds throughout, so that a busy machine shows the same. `idle` follows 50 replicas of ours whose streams are silent (asked
for their load instead) and 50 of vLLM's with 29 kB pages, served by another process.
"""

import asyncio
import multiprocessing
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.load.poller import LoadPoller
from penstock.gateway.load.replica_client import ReplicaClient
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.state import FleetState
from penstock.gateway.residency.index import ResidencyIndex
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import ExtraKeys
from penstock.prompt.memo import PrefixMemo
from penstock.prompt.processor import CHAT_PATH, PromptProcessor

ROOT = Path(__file__).parents[1]
REPLICAS, BLOCKS = 100, 10_000
IDLE_S = 15.0
LINE = 'vllm:filler_bucket{engine="0",le="%d",model_name="m"} 1.0\n'
PAGE = ("".join(LINE % n for n in range(500)) + "vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n").encode()


def cpu(job: Callable[[], object], times: int) -> float:
    """CPU microseconds of one call."""
    job()
    before = time.process_time()
    for _ in range(times):
        job()
    return (time.process_time() - before) / times * 1e6


def index() -> dict[str, float]:
    """A million blocks at 100 replicas, a tenth of them shared by ten."""
    chance = random.Random(0)
    keys = [ReplicaKey(f"uid-{n}", 8000) for n in range(REPLICAS)]
    tracemalloc.start()
    known = ResidencyIndex()
    shared = [chance.randbytes(32) for _ in range(BLOCKS)]
    for at, key in enumerate(keys):
        own = [chance.randbytes(32) for _ in range(BLOCKS * 9 // 10)]
        part = at % 10 * (BLOCKS // 10)
        known.store(key, own + shared[part : part + BLOCKS // 10])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    prompt = [chance.randbytes(32) for _ in range(500)]
    for key in keys:
        known.store(key, prompt[: chance.randrange(1, 500)])
    some = [chance.randbytes(32) for _ in range(1000)]

    def churn() -> None:
        known.store(keys[0], some)
        known.remove(keys[0], some)

    return {
        "MB a million blocks": taken / known.entries,
        "lookup, 500 blocks, 100 replicas, µs": cpu(lambda: known.longest_prefix(prompt), 200),
        "store and remove, µs a block": cpu(churn, 20) / 1000,
        "emptying a replica, µs": cpu(lambda: (known.clear(keys[1]), known.store(keys[1], some)), 20) - cpu(churn, 20) / 2,
    }


def prompts() -> dict[str, float]:
    """Chats of 4k and 32k tokens with the demo model's tokenizer, first and next turn."""
    bundle = PromptBundle.from_checkpoint(
        ROOT / "examples" / "models" / "penstock-tiny",
        served_names=("m",),
        block_size=16,
        hash_seed="bench",
        max_model_len=10**6,
    )
    processor = PromptProcessor(bundle)
    words = (ROOT / "README.md").read_text().split()
    found: dict[str, float] = {}
    for size in (4_000, 32_000):
        first: list[float] = []
        then: list[float] = []
        for seed in range(5):
            chance, memo = random.Random(seed), PrefixMemo(processor)
            text: list[str] = []
            while len(processor.tokenizer.encode(" ".join(text)).ids) < size:
                text += chance.choices(words, k=size // 8)
            messages = [{"role": "user", "content": " ".join(text)}]
            first.append(cpu_once(memo, messages))
            messages += [{"role": "assistant", "content": " ".join(words[:150])}, {"role": "user", "content": "And then?"}]
            then.append(cpu_once(memo, messages))
        found[f"{size // 1000}k tokens, first turn, ms"] = min(first)
        found[f"{size // 1000}k tokens, next turn, ms"] = min(then)
    return found


def cpu_once(memo: PrefixMemo, messages: list[dict[str, str]]) -> float:
    """CPU milliseconds to tokenise and hash."""
    before = time.process_time()
    memo.hashed(CHAT_PATH, {"messages": messages}, ExtraKeys())
    return (time.process_time() - before) * 1e3


class Pages(asyncio.Protocol):
    """Answers every request with the page of its path."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take in bytes."""
        body = PAGE if b" /metrics " in data else msgspec.json.encode(LoadReport(epoch=1, seq=1))
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


def serve(ports: Any) -> None:
    """The replicas' side, until it is killed."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Pages, "127.0.0.1", 0) for _ in range(REPLICAS)]
        ports.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    asyncio.run(run())


async def idle() -> dict[str, float]:
    """CPU of following replicas that do nothing, as a share of one core."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    ports = here.recv()
    replicas = [
        Replica(
            uid=f"u{n}",
            name=f"r{n}",
            pool="p",
            host="127.0.0.1",
            port=port,
            events_port=0,
            replay_port=0,
            ready=True,
            engine="vllm" if n % 2 else "penstock",
        )
        for n, port in enumerate(ports)
    ]
    follower = FleetFollower(FleetState())
    follower.update(Fleet(models=[Model(id="m", served_names=["m"])], pools=[Pool(id="p", model="m")], replicas=replicas))
    async with aiohttp.ClientSession() as session:
        task = asyncio.create_task(LoadPoller(follower.state, follower.learned).run(ReplicaClient(session)))
        await asyncio.sleep(3)
        before, began = time.process_time(), time.monotonic()
        await asyncio.sleep(IDLE_S)
        share = (time.process_time() - before) / (time.monotonic() - began)
        task.cancel()
    await follower.close()
    process.kill()
    return {"idle replicas": REPLICAS, "% of a core": share * 100}


def main() -> None:
    """Measures, prints, writes."""
    import uvloop

    results = {"index": index(), "prompts": prompts(), "idle": uvloop.run(idle())}
    table = Table("part", "figure", "value")
    for part, figures in results.items():
        for name, value in figures.items():
            table.add_row(part, name, f"{value:,.1f}")
    Console().print(table)
    path = write_results("residency", results)
    Console().print(f"written to {path}")


if __name__ == "__main__":
    main()
