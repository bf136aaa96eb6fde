"""What one engine serves on a CPU, beside the peers that `make bench-peers` has installed: over HTTP, where one load generator,
ours, keeps streams running against each server in turn; and in process, without a server.

    make bench-engine
    make bench-engine ARGS=--quick

The model is a random Llama of 12.6 M parameters in bf16, made on the fly; 128 tokens in, 64 out, greedy, one thread each. A
stream sends its next request when the last has ended; every prompt is new, so that nothing comes from a prefix cache. Rates a CPU
second count the whole process tree of a server, read from /proc. They are the ones to compare, and by the ratio of neighbours in
one run: a machine that others use too slows all of them alike.

On a CPU with AVX-512 everything is measured twice: at the machine's best, and kept to AVX2 with those peers that have a switch.
Gates follow; that of AVX2 is judged only on a CPU without AVX-512, where all use what there is.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import compare, servers
from peers.loop import OUTPUT, PROMPT, VOCAB
from peers.model import make_model
from peers.over_http import bench_servers
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.kernels.cpu.isa import Isa, available

STREAMS = (1, 4, 8, 16, 32)
QUICK = (1, 8)
SECONDS, QUICK_SECONDS = 8.0, 2.0
Row = dict[str, Any]


def bench_generate(model: Path, streams: Sequence[int], seconds: float) -> list[Row]:
    """transformers' `generate` on static batches, on one thread: its best case, as all requests begin and end together."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    rows: list[Row] = []
    for batch in streams:
        inputs = torch.randint(3, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
        options = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        network.generate(inputs, max_new_tokens=2, **options)
        tokens, start, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < start + seconds:
            tokens += network.generate(inputs, max_new_tokens=OUTPUT, **options).numel() - inputs.numel()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        rates = {"tok_per_s": round(tokens / wall, 1), "tok_per_cpu_s": round(tokens / cpu, 1)}
        rows.append({"server": "transformers, static", "streams": batch, **rates})
    return rows


def add_ratios(rows: list[Row], ours: str) -> None:
    """Writes to each row by what factor `ours` has more tokens a CPU second with as many streams."""
    own = {row["streams"]: row["tok_per_cpu_s"] for row in rows if row["server"] == ours}
    for row in rows:
        row["penstock_over_it"] = round(own[row["streams"]] / row["tok_per_cpu_s"], 3)


def show(title: str, rows: list[Row], console: Console) -> None:
    """One table."""
    keys = ("streams", "server", "tok_per_s", "tok_per_cpu_s", "penstock_over_it", "ttft_p50_ms", "itl_p50_ms")
    heads = ("streams", "", "tok/s", "tok/cpu-s", "Penstock ÷ it", "TTFT p50 ms", "ITL p50 ms")
    table = Table(*heads, title=f"{title}; 12.6 M Llama, bf16, {PROMPT} in, {OUTPUT} out")
    for row in sorted(rows, key=lambda row: row["streams"]):  # stable: the servers keep their order
        table.add_row(*[str(row.get(key, "–")) for key in keys])
    console.print(table)


@dataclass(frozen=True)
class Gate:
    """What Penstock's tokens a CPU second must be over a peer's."""

    rows: str
    peer: str
    streams: int
    isa: str | None
    """The instruction set for which the gate holds; None: the machine's best, whatever it is."""
    ratio: float


GATES = (
    *[Gate("in_process", "openvino-genai", streams, "avx2", 0.9) for streams in (1, 8, 16)],
    *[
        Gate("in_process", "openvino-genai", streams, isa, ratio)
        for isa in ("amx", "avx512_bf16")
        for streams, ratio in ((1, 1.08), (8, 1.13), (16, 0.86))
    ],
    Gate("http", "llama.cpp", 1, None, 1.0),
    *[Gate("http", "llama.cpp", streams, None, 1.5) for streams in (4, 8, 16, 32)],
)


def judge(found: dict[str, dict[str, Any]], best: str) -> list[str]:
    """A line for each gate of which there are figures: met, missed by how much, or why it is not judged."""
    lines: list[str] = []
    for gate in GATES:
        isa = gate.isa or best
        for row in found.get(isa, {}).get(gate.rows, ()):
            if (row["server"], row["streams"]) == (gate.peer, gate.streams):
                ratio = row["penstock_over_it"]
                met = "met" if ratio >= gate.ratio else f"missed by {gate.ratio - ratio:.2f}"
                verdict = met if isa == best else f"not judged: this CPU has {best}"
                lines.append(f"{isa}, {gate.streams} streams, over {gate.peer}: {ratio:.2f} of {gate.ratio:.2f}, {verdict}")
    return lines


def levels() -> dict[str, Isa | None]:
    """The instruction sets that are measured, by name; None: whatever each engine chooses."""
    best, *less = available()
    return {best.name: None} | {isa.name: isa for isa in less if isa.name == "avx2"}


def measure(streams: Sequence[int], seconds: float, isa: Isa | None, console: Console) -> dict[str, Any]:
    """All rows of one instruction set, over HTTP and in process, and what is absent."""
    start = time.perf_counter()

    def say(what: str) -> None:
        console.print(f"[dim]{time.perf_counter() - start:4.0f} s  {what}[/dim]", highlight=False)

    say("making the model")
    model = make_model()
    with tempfile.TemporaryDirectory() as logs:
        served, absent = asyncio.run(bench_servers(model, Path(logs), streams, seconds, isa, say))
    inner, missing = compare.bench_in_process(model, streams, seconds, isa, say)
    if isa is None:  # in this process, which nothing keeps to less
        say("transformers, static batches")
        inner += bench_generate(model, streams, seconds)
    add_ratios(served, servers.PENSTOCK)
    add_ratios(inner, compare.PENSTOCK)
    return {"http": served, "in_process": inner, "absent": absent | missing, "seconds": round(time.perf_counter() - start)}


def main() -> int:
    """Prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", metavar="N", help=f"how many at a time (default: {STREAMS})")
    parser.add_argument("--seconds", type=float, help=f"of each row (default: {SECONDS:.0f})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} streams, {QUICK_SECONDS:.0f} s a row; writes no JSON")
    args = parser.parse_args()
    streams = args.streams or (QUICK if args.quick else STREAMS)
    if max(streams) > servers.MOST_STREAMS:
        parser.error(f"--streams goes to {servers.MOST_STREAMS}")
    console = Console()
    seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    found: dict[str, dict[str, Any]] = {}
    for name, isa in levels().items():
        console.rule(name)
        found[name] = measure(streams, seconds, isa, console)
        show("Over HTTP", found[name]["http"], console)
        show("In process", found[name]["in_process"], console)
        for absent, reason in found[name]["absent"].items():
            console.print(f"{absent}: {reason}", markup=False)
    verdicts = judge(found, best=next(iter(found)))
    for line in verdicts:
        console.print(line, highlight=False)
    if args.quick:
        return 0
    path = write_results("engine", {"isa": found, "gates": verdicts})
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
