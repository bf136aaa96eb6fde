"""What the engine and its kernels reach on one GPU, beside what the device could do and what others do: one JSON.

    make bench-gpu
    make bench-gpu ARGS="--only itl_8b decode_attention"

Measured at the core, without a server, with made-up weights in the shapes of `benchmarks/shapes/`. Each figure runs in a process
of its own and may fail, or take too long, alone. Gates are for one H200: elsewhere the shares of the roofline say more.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.figures import FIGURES, Row
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LIMIT_S = 540
"""Of everything together: a machine that is lent by the ten minutes."""


def machine() -> Row | None:
    """What is there; None: no CUDA device is."""
    import torch

    if not torch.cuda.is_available():
        return None
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def run_figure(name: str, limit_s: float) -> Row:
    """The figure's result, or why there is none under `failed`."""
    command = [sys.executable, "-m", "gpu.run", name]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        told = error.stderr or b""
        last = (told if isinstance(told, str) else told.decode(errors="replace")).strip().rpartition("\n")[2]
        return {"failed": f"took more than {limit_s:.0f} s; it said last: {last}"}
    if done.returncode:
        return {"failed": done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}", "log": done.stderr[-4000:]}
    return json.loads(done.stdout.splitlines()[-1])


def run_figures(
    names: list[str], total_s: float, run: Callable[[str, float], Row], now: Callable[[], float], say: Callable[[str], None]
) -> dict[str, Row]:
    """One after the other, as far as the time goes; what it does not suffice for is said to have failed."""
    start, results = now(), dict[str, Row]()
    for name in names:
        figure, left = FIGURES[name], total_s - (now() - start)
        if left < figure.limit_s / 4:
            results[name] = {"failed": f"not begun: {left:.0f} s are left (--only {name})"}
            continue
        say(f"{now() - start:4.0f} s  {name}: {figure.what}")
        result = run(name, min(left, figure.limit_s))
        if "value" in result:
            result |= figure.gate.judge(result["value"]) if figure.gate.value else {"unit": figure.gate.unit, "told": "a peer"}
        results[name] = result
    return results


def show(results: dict[str, Row], console: Console) -> None:
    """The table, and below it what each missed gate is bound by, and what else a figure says."""
    table = Table("figure", "", "value", "gate", "stretch", "", title="One GPU")
    for name, result in results.items():
        figure = FIGURES[name]
        cells = ["–", "–", "–", str(result.get("failed", ""))[:60]]
        if "value" in result:
            gate = [f"{number:g}" if number else "–" for number in (figure.gate.value, figure.gate.stretch)]
            cells = [f"{result['value']:.4g} {figure.gate.unit}", *gate, result["told"]]
        table.add_row(name, figure.what, *cells)
    console.print(table)
    for name, result in results.items():
        if "bound_by" in result and not result.get("met", False):
            console.print(f"{name}: bound by {result['bound_by']}", markup=False)
        for line in result.get("says", ()):
            console.print(f"{name}: {line}", markup=False)


def main() -> int:
    """Prints the table and writes the JSON; 2 where there is no device, 1 where a gate was missed and `--check` was asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="of everything together (%(default)s)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (benchmarks/results/gpu-DATE.json)")
    parser.add_argument("--check", action="store_true", help="fail where a gate was missed")
    args = parser.parse_args()
    console, there = Console(), machine()
    if there is None:
        console.print("bench-gpu: torch sees no CUDA device here; docs/kernels.md says what runs without one", markup=False)
        return 2
    console.print(", ".join(f"{key} {value}" for key, value in there.items()), markup=False)
    names = args.only or list(FIGURES)
    results = run_figures(names, args.seconds, run_figure, time.monotonic, lambda text: console.print(text, markup=False))
    show(results, console)
    now = datetime.now(UTC)
    path = args.out or RESULTS / f"gpu-{now:%Y-%m-%d}.json"
    document: dict[str, Any] = {"benchmark": "gpu", "time": now.isoformat(timespec="seconds"), "machine": there}
    path.write_text(json.dumps(document | {"figures": results}, indent=2) + "\n")
    console.print(f"written to {path}", markup=False)
    return int(args.check and not all(result.get("met", "value" in result) for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
