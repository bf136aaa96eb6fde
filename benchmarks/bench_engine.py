"""What one engine serves on a CPU: a closed loop of streams against `penstock serve`, and transformers' `generate` beside it.

    make bench-engine

The model is a random Llama of 12.6 M parameters in bf16, made on the fly; 128 tokens in, 64 out, greedy. A stream sends its next
request when the last has ended; every prompt is new, so that nothing comes from the prefix cache. Rates a CPU second count the
whole process tree of a server, read from /proc, and are the ones to compare on a machine that others use too.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.client.bench.arrivals import drive
from penstock.client.bench.datasets import Request
from penstock.client.bench.records import Record
from penstock.client.bench.report import Cost, summarize
from penstock.client.bench.sender import Sender
from penstock.client.server import Server, ServerError

STREAMS = (1, 8, 16)
PROMPT, OUTPUT, VOCAB = 128, 64, 4096
SECONDS = 8.0
ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "examples/models/penstock-tiny"
RESULTS = Path(__file__).parent / "results"
TICKS = os.sysconf("SC_CLK_TCK")
Row = dict[str, Any]


def make_model(path: Path) -> None:
    """A random Llama in bf16 with the demo model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, path)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def serving(model: Path) -> Iterator[tuple[str, int]]:
    """A server with its address and process id."""
    port, events, replay = free_ports(3)
    flags = ["--port", port, "--events-port", events, "--replay-port", replay, "--kv-cache-memory-bytes", 2**26]
    command = [sys.executable, "-m", "penstock.cli", "serve", model, "--served-model-name", "bench", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / TICKS + sum(cpu_seconds(int(child)) for child in children)


async def wait_ready(server: Server) -> None:
    """Returns when the server takes requests; raises `TimeoutError` after two minutes."""
    async with asyncio.timeout(120):
        while True:
            with suppress(ServerError):  # not listening, or not ready yet
                await server.get("/ready")
                return
            await asyncio.sleep(0.2)


async def closed_loop(sender: Sender, pid: int, streams: int) -> Row:
    """Keeps `streams` requests running for `SECONDS` and for what has begun by then."""
    rng = np.random.default_rng(streams)
    records: list[Record] = []

    async def one(due: float, request: Request) -> None:
        records.append(await sender.send(due, request))

    def requests() -> Iterator[tuple[float, Request]]:
        while time.perf_counter() < end:
            yield 0.0, Request(rng.integers(3, VOCAB, PROMPT).tolist(), OUTPUT)

    start, cpu, own = time.perf_counter(), cpu_seconds(pid), time.process_time()
    end = start + SECONDS
    await drive(requests(), one, max_concurrency=streams)
    wall, cpu, own = time.perf_counter() - start, cpu_seconds(pid) - cpu, time.process_time() - own
    report = summarize(records, wall, [50], {}, Cost(devices=1))
    assert not report.errors, report.errors
    assert report.output_tokens == len(records) * OUTPUT, "an answer is shorter than it should be"
    return {
        "server": "penstock serve",
        "streams": streams,
        "tok_per_s": round(report.output_throughput, 1),
        "tok_per_cpu_s": round(report.output_tokens / cpu, 1),
        "ttft_p50_ms": round(report.latencies["ttft"].median, 1),
        "itl_p50_ms": round(report.latencies["itl"].median, 2),
        "client_cpu_share": round(own / wall, 2),
    }


async def bench_penstock(model: Path) -> list[Row]:
    """One row a number of streams."""
    with serving(model) as (url, pid):
        async with Server(url) as server:
            await wait_ready(server)
            sender = Sender(server, "/v1/completions", "bench", {"temperature": 0, "ignore_eos": True})
            await sender.send(0.0, Request([5] * PROMPT, OUTPUT))
            return [await closed_loop(sender, pid, streams) for streams in STREAMS]


def bench_transformers(model: Path) -> list[Row]:
    """`generate` on static batches of the same sizes, on one thread, which is its best case: all begin and end together."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    rows: list[Row] = []
    for batch in STREAMS:
        inputs = torch.randint(3, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
        options = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        network.generate(inputs, max_new_tokens=2, **options)
        tokens, start, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < start + SECONDS:
            tokens += network.generate(inputs, max_new_tokens=OUTPUT, **options).numel() - inputs.numel()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        rates = {"tok_per_s": round(tokens / wall, 1), "tok_per_cpu_s": round(tokens / cpu, 1)}
        rows.append({"server": "transformers", "streams": batch, **rates})
    return rows


def show(rows: list[Row], console: Console) -> None:
    """The table."""
    table = Table("", "streams", "tok/s", "tok/cpu-s", "TTFT p50 ms", "ITL p50 ms", title="12.6 M Llama, bf16, 128 in, 64 out")
    keys = ("server", "streams", "tok_per_s", "tok_per_cpu_s", "ttft_p50_ms", "itl_p50_ms")
    for row in rows:
        table.add_row(*[str(row.get(key, "–")) for key in keys])
    console.print(table)


def main() -> int:
    """Prints the table and writes the JSON."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        with console.status("making the model"):
            make_model(model)
        with console.status(f"penstock serve, {len(STREAMS)} × {SECONDS:.0f} s"):
            rows = asyncio.run(bench_penstock(model))
        with console.status(f"transformers, {len(STREAMS)} × {SECONDS:.0f} s"):
            rows += bench_transformers(model)
    show(rows, console)
    now = datetime.now(UTC)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"engine-{now:%Y-%m-%d}.json"
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    document = {"benchmark": "engine", "time": now.isoformat(timespec="seconds"), **machine, "rows": rows}
    path.write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"written to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
