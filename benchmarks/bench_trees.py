"""Two checkouts against each other: tokens a CPU second of our core in process, on the model of `make bench-engine`.

    python benchmarks/bench_trees.py OLD NEW

Each tree has a process of its own. They are measured in turn, several times over, in changing order. What counts is the ratio
within a round: a machine that others use too slows both alike.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from peers.compare import Process
from peers.model import make_model
from rich.console import Console
from rich.table import Table

PARTS = ("benchmarks", "common", "kernels", "engine")
"""Of a checkout: each brings the loop that turns its core, since the calls may have changed between the two."""
START = """
import runpy, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import penstock.engine.args as found
if not Path(found.__file__).is_relative_to({folder!r}):
    raise SystemExit(f"{folder} is no checkout: the engine is {{found.__file__}}")
sys.argv = ["run_penstock", {model!r}]
runpy.run_module("peers.run_penstock", run_name="__main__")
"""


def start(folder: Path, model: Path, stack: ExitStack) -> Process:
    """The core of a checkout, whose sources come before those that are installed."""
    folder = folder.resolve()
    source = START.format(paths=[str(folder / part) for part in PARTS], folder=str(folder), model=str(model))
    command: list[str | Path] = [sys.executable, "-c", source]
    return stack.enter_context(closing(Process(command, None, stack.enter_context(tempfile.TemporaryFile("w+")))))


def main(trees: Sequence[Path], streams: Sequence[int], rounds: int, seconds: float) -> None:
    """Prints the median ratio, new by old, for each number of streams."""
    table = Table("streams", "old tok/CPU s", "new tok/CPU s", "new / old", "quartiles", title="In process")
    with ExitStack() as stack:
        model = make_model()
        processes = [start(folder, model, stack) for folder in trees]
        for count in streams:
            found: list[list[float]] = [[], []]
            for number in range(rounds):
                for at in (0, 1) if number % 2 == 0 else (1, 0):
                    found[at].append(processes[at].measure(count, seconds)["tok_per_cpu_s"])
            ratios = [new / old for old, new in zip(*found, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            old, new = (statistics.median(each) for each in found)
            table.add_row(str(count), f"{old:.0f}", f"{new:.0f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs=2, metavar="TREE", help="a checkout: the old one, then the new one")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.5)
    arguments = parser.parse_args()
    main(arguments.trees, arguments.streams, arguments.rounds, arguments.seconds)
