"""What a linear layer in bfloat16 costs a thread of a CPU: our kernel by instruction set, beside torch's.

    make bench-linear
    make bench-linear ARGS=--quick

Weights are read from memory, as a step reads them: there are as many of a shape as take about 100 MB. The forms take turns,
several times over; each figure is the best.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.kernels.cpu.isa import available
from penstock.kernels.linear.reference import pack_weight
from penstock.kernels.ops import ops_for

SHAPES, QUICK_SHAPES = ((1024, 1024), (2048, 8192), (5632, 2048)), ((1024, 1024),)
"""Inputs and outputs."""
ROWS, QUICK_ROWS = (1, 4, 16, 32, 96, 512), (1, 32)
TURNS, QUICK_TURNS = 5, 2
WEIGHT_BYTES = 10**8


def forms(inputs: int, outputs: int, count: int) -> dict[str, Callable[[torch.Tensor], None]]:
    """By name, what multiplies so many weights of a shape by the same rows."""
    plain = [(torch.randn(outputs, inputs) / inputs**0.5).bfloat16() for _ in range(count)]
    packed = [pack_weight(weight) for weight in plain]
    found: dict[str, Callable[[torch.Tensor], None]] = {}
    for isa in available():
        linear = ops_for("cpu", torch.bfloat16, isa.name).linear
        if linear is not None and isa.name != "portable":  # it is for CPUs without vectors

            def ours(x: torch.Tensor, linear: Any = linear) -> None:
                for weight in packed:
                    linear(x, weight, None, outputs)

            found[isa.name] = ours

    def torchs(x: torch.Tensor) -> None:
        for weight in plain:
            F.linear(x, weight)

    return found | {"torch": torchs}


def measure(inputs: int, outputs: int, numbers: Sequence[int], turns: int) -> Iterator[dict[str, Any]]:
    """A row for each number of rows and form."""
    size = 2 * inputs * outputs
    count = max(1, WEIGHT_BYTES // size)
    sides = forms(inputs, outputs, count)
    for rows in numbers:
        x = torch.randn(rows, inputs).bfloat16()
        best = dict.fromkeys(sides, float("inf"))
        for turn in range(1 + turns):
            for name, side in sides.items():
                began = time.perf_counter()
                side(x)
                if turn:  # the first one warms up
                    best[name] = min(best[name], (time.perf_counter() - began) / count)
        for name, seconds in best.items():
            yield {
                "inputs": inputs,
                "outputs": outputs,
                "rows": rows,
                "form": name,
                "us": round(1e6 * seconds, 1),
                "gflop_s": round(rows * size / seconds / 1e9, 1),
                "gb_s": round(size / seconds / 1e9, 1),
            }


def main() -> None:
    """Measures, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, fewer rows; nothing is written")
    quick: bool = parser.parse_args().quick
    torch.set_num_threads(1)
    console, results = Console(), list[dict[str, Any]]()
    with console.status("linear layers") as status:
        for inputs, outputs in QUICK_SHAPES if quick else SHAPES:
            status.update(f"{inputs} × {outputs}")
            results += measure(inputs, outputs, QUICK_ROWS if quick else ROWS, QUICK_TURNS if quick else TURNS)
    table = Table(*results[0], title="a linear layer in bfloat16, one thread")
    for row in results:
        table.add_row(*map(str, row.values()))
    console.print(table)
    if not quick:
        console.print(write_results("linear", {"rows": results}))


if __name__ == "__main__":
    main()
