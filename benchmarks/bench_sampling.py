"""What choosing a token costs on a CPU, in microseconds of CPU time a row.

    make bench-sampling
    make bench-sampling ARGS=--quick

The compiled sampler, the same in torch (where there is no compiler), and transformers' logits processors with torch.multinomial,
over the same logits in one thread. Logits are of a normal distribution with standard deviation 3, to which a peak is added as
models have it. The forms take turns, several times over; each figure is the median.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from report import write_results
from rich.console import Console
from rich.table import Table
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.kernels.sampling.buffers import Path, SamplingBuffers
from penstock.kernels.sampling.ops import CPU, SamplingOps, cpu_sampling_ops
from penstock.kernels.sampling.params import pack

VOCABULARIES, QUICK_VOCABULARIES = (4096, 151_936), (4096,)
ROWS = (1, 32)
ROUNDS, QUICK_ROUNDS = 9, 3
KINDS: dict[str, tuple[Path, dict[str, Any]]] = {
    "greedy": (Path.GREEDY, {"temperature": 0.0}),
    "temperature 1": (Path.RANDOM, {"temperature": 1.0}),
    "top-k 20, top-p 0.8": (Path.FILTERED, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
    "top-p 0.95": (Path.FILTERED, {"temperature": 1.0, "top_p": 0.95}),
}


def ours(ops: SamplingOps, logits: torch.Tensor, path: Path, asked: dict[str, Any]) -> Callable[[], Any]:
    """A call of one of our forms."""
    count, vocab = logits.shape
    of = pack(**({"seed": 1, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | asked))
    params = torch.from_numpy(np.tile(of, (count, 1)))
    buffers = SamplingBuffers.allocate(count, vocab if ops.tiles else 0, torch.device("cpu"))
    rows, positions = torch.arange(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32) + 100
    return lambda: ops.sample(logits, rows, positions, params, buffers, path, False)


def of_transformers(logits: torch.Tensor, asked: dict[str, Any]) -> Callable[[], Any]:
    """What `generate` does with a step's logits."""
    if not asked["temperature"]:
        return lambda: logits.argmax(-1)
    processors = LogitsProcessorList([TemperatureLogitsWarper(asked["temperature"])] if asked["temperature"] != 1 else [])
    if "top_k" in asked:
        processors.append(TopKLogitsWarper(asked["top_k"]))
    if "top_p" in asked:
        processors.append(TopPLogitsWarper(asked["top_p"]))
    none = torch.zeros(len(logits), 1, dtype=torch.long)
    return lambda: torch.multinomial(torch.softmax(processors(none, logits), dim=-1), 1)


def microseconds(call: Callable[[], Any], rows: int) -> float:
    """CPU time of a call over rows, of at least 50 ms of calls."""
    calls, began = 0, time.process_time()
    while (taken := time.process_time() - began) < 0.05:
        call()
        calls += 1
    return 1e6 * taken / calls / rows


def measure(vocabularies: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """A row for each vocabulary, number of rows and kind of request."""
    found, native = [], cpu_sampling_ops()
    for vocab in vocabularies:
        for rows in ROWS:
            logits = torch.randn(rows, vocab) * 3
            logits[:, :8] += torch.linspace(16, 12, 8)
            for kind, (path, asked) in KINDS.items():
                calls = {
                    native.form: ours(native, logits, path, asked),
                    "torch": ours(CPU, logits, path, asked),
                    "transformers": of_transformers(logits, asked),
                }
                times: dict[str, list[float]] = {name: [] for name in calls}
                for _ in range(rounds):
                    for name, call in calls.items():
                        times[name].append(microseconds(call, rows))
                medians = {name: round(statistics.median(each), 1) for name, each in times.items()}
                found.append({"vocabulary": vocab, "rows": rows, "kind": kind, "us a row": medians})
    return found


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small vocabulary and fewer rounds; nothing is written")
    quick: bool = parser.parse_args().quick
    torch.set_num_threads(1)
    rows = measure(QUICK_VOCABULARIES if quick else VOCABULARIES, QUICK_ROUNDS if quick else ROUNDS)
    table = Table("vocabulary", "rows", "request", *rows[0]["us a row"], title="µs of CPU time a row")
    for row in rows:
        table.add_row(str(row["vocabulary"]), str(row["rows"]), row["kind"], *map(str, row["us a row"].values()))
    console = Console()
    console.print(table)
    if not quick:
        console.print(write_results("sampling", {"rows": rows}))


if __name__ == "__main__":
    main()
