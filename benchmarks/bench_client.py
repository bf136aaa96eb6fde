"""What `penstock bench` itself costs: its CPU time for a token, against a server that only writes chunks.

    make bench-client

The server, a process of its own, sends each of 64 streams a chunk of one token at a time: at an even pace, as an engine's steps
do, or as fast as it can, when several chunks come in one read. The inverse of the CPU time for a token is the rate at which one
client would be the bottleneck.
"""

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import uvloop
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.client.bench.arrivals import drive
from penstock.client.bench.datasets import Request
from penstock.client.bench.records import Record
from penstock.client.bench.report import Cost, summarize
from penstock.client.bench.sender import Sender
from penstock.client.server import Server

STREAMS, TOKENS, PROMPT = 64, 400, 128
PACES = (20.0, 10.0, 0.0)
"""Milliseconds between the chunks of a stream; 0: none."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,'
    b'"text":" word","logprobs":null,"finish_reason":%s}],"usage":null}\n\n'
)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":128,"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % TOKENS


def framed(data: bytes) -> bytes:
    """A chunk of HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


MIDDLE, LAST = framed(CHUNK % b"null"), framed(CHUNK % b'"length"') + framed(USAGE) + b"0\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace_s: float) -> None:
    """Answers the requests of one connection."""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            writer.write(HEAD)
            for _ in range(TOKENS - 1):
                await asyncio.sleep(pace_s)
                writer.write(MIDDLE)
                await writer.drain()
            writer.write(LAST)


async def serve(listener: int, pace_s: float) -> None:
    """Runs the server on an inherited socket until it is killed."""
    listening = socket.socket(fileno=listener)
    server = await asyncio.start_server(lambda reader, writer: answer(reader, writer, pace_s), sock=listening)
    await server.serve_forever()


async def load(port: int) -> dict[str, Any]:
    """One row: two answers a stream."""
    records: list[Record] = []
    async with Server(f"http://127.0.0.1:{port}") as server:
        sender = Sender(server, "/v1/completions", "m", {})

        async def one(due: float, request: Request) -> None:
            records.append(await sender.send(due, request))

        await sender.send(0.0, Request([5] * PROMPT, TOKENS))  # waits for the server, whose socket listens already
        start, cpu = time.perf_counter(), time.process_time()
        await drive([(0.0, Request([5] * PROMPT, TOKENS))] * (2 * STREAMS), one, max_concurrency=STREAMS)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    report = summarize(records, wall, [50, 99], {}, Cost(devices=1))
    assert not report.errors, report.errors
    return {
        "tok_per_s": round(report.output_throughput),
        "cpu_us_per_tok": round(cpu / report.output_tokens * 1e6, 1),
        "cpu_share": round(cpu / wall, 2),
        "saturates_at_tok_per_s": round(report.output_tokens / cpu),
        "itl_p50_ms": round(report.latencies["itl"].median, 2),
        "itl_p99_ms": round(report.latencies["itl"].percentiles[99], 2),
    }


def measure(pace_ms: float) -> dict[str, Any]:
    """The row of a pace."""
    with socket.create_server(("127.0.0.1", 0), backlog=STREAMS) as listener:
        port, number = listener.getsockname()[1], listener.fileno()
        command = [sys.executable, __file__, "--serve", str(number), str(pace_ms / 1000)]
        server = subprocess.Popen(command, pass_fds=[number])
    try:
        return {"pace_ms": pace_ms} | uvloop.run(load(port))
    finally:
        server.kill()
        server.wait()


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    if arguments := parser.parse_args().serve:
        uvloop.run(serve(int(arguments[0]), float(arguments[1])))
    console = Console()
    with console.status(f"{len(PACES)} paces"):
        rows = [measure(pace) for pace in PACES]
    names = ("pace ms", "tok/s", "CPU µs/tok", "share of a core", "one core: tok/s", "ITL p50 ms", "ITL p99 ms")
    table = Table(*names, title=f"The load generator's own cost: {STREAMS} streams, a token a chunk")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    path = write_results("client", {"rows": rows})
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
