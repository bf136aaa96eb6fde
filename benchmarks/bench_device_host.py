"""What the host does for a decode step on a GPU, measured without one.

    make bench-device-host

The core and the device runner are a server's own. The tensors have shapes and no content, CUDA graphs replay nothing, and no
kernel is launched: what is left is Python. A device adds the calls of its driver: a copy, a graph's launch, an event, and a copy
back. Steps are timed by the process's own CPU time, so that a neighbour on the machine counts little.
"""

import argparse
import statistics
import time
from pathlib import Path
from unittest.mock import patch

from report import write_results
from rich.console import Console
from rich.table import Table
from triton.runtime.jit import JITFunction

from penstock.engine.args import EngineArgs
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import executor_of
from penstock.engine.messages import AddRequest
from penstock.engine.runner.device.warm import MetaRunner
from penstock.engine.sampling import SamplingParams
from penstock.kernels.compile_only import compile_only

SHAPE = Path(__file__).parent / "shapes/qwen3-0.6b"
BATCHES = (1, 16, 64, 256)
BLOCK, PROMPT, WARM_UP, STEPS = 16, 4, 20, 400
TARGET_BATCH, TARGET_US = 256, 300
ARCH = "sm_90"


def decoding(batch: int) -> EngineCore:
    """A core whose requests have all been prefilled, in steps that are one full graph each."""
    length = PROMPT + BLOCK + WARM_UP + STEPS + 8
    config = EngineArgs(
        model=str(SHAPE),
        load_format="dummy",
        max_num_seqs=batch,
        max_model_len=length,
        cudagraph_capture_sizes=(batch,),
        enable_prefix_caching=False,
    ).config("cuda")
    runner, num_blocks = MetaRunner(config, ARCH), 2 + batch * -(-length // BLOCK)
    runner.load()
    runner.initialize_kv_cache(num_blocks)
    while runner.graphs.capture_next():
        pass
    core = EngineCore(config, executor_of(config, runner), num_blocks, 1, groups=runner.kv_layout().groups)
    for index in range(batch):
        # Of different lengths, so that blocks fill at different steps.
        prompt = [1] * (PROMPT + index % BLOCK)
        sampling = SamplingParams(max_tokens=length - len(prompt), temperature=0.6, seed=index)
        core.handle(AddRequest(index, f"r{index}", prompt, sampling, 0.0))
    return core


def turn(core: EngineCore) -> float:
    """Microseconds of CPU that one turn of the core takes."""
    began = time.process_time_ns()
    core.step()
    core.take_events()
    return (time.process_time_ns() - began) / 1e3


def measure(batch: int) -> dict[str, float]:
    """Microseconds a step; RuntimeError where a step is no full graph."""
    # Launches ask Triton's driver what they run on: the one of `compile_only` answers, and nothing is compiled.
    with compile_only(ARCH), patch.object(JITFunction, "run", lambda *_, **__: None):
        core = decoding(batch)
        for _ in range(WARM_UP):
            turn(core)
        before = _full(core)
        samples = sorted(turn(core) for _ in range(STEPS))
        if _full(core) - before != STEPS:
            raise RuntimeError(f"{STEPS - _full(core) + before} of {STEPS} steps were no full graph")
        core.close()
    return {
        "batch": batch,
        "p10_us": samples[int(0.1 * STEPS)],
        "p50_us": statistics.median(samples),
        "p90_us": samples[int(0.9 * STEPS)],
    }


def _full(core: EngineCore) -> int:
    """Steps so far that were one graph."""
    stats = core.stats().step
    assert stats is not None
    return sum(found.steps for found in stats.graphs if found.mode == "FULL")


def main() -> int:
    """Prints the table, writes the JSON; 1 where the target is missed and `--check` was asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help=f"fail above {TARGET_US} µs at {TARGET_BATCH}")
    arguments = parser.parse_args()
    console = Console()
    rows = [measure(batch) for batch in BATCHES]
    table = Table("running decodes", "p10 µs", "p50 µs", "p90 µs", title="The host's part of a full-graph step, without a driver")
    for row in rows:
        table.add_row(*[f"{value:.0f}" for value in row.values()])
    console.print(table)
    console.print(f"written to {write_results('device-host', {'rows': rows})}")
    at_target = next(row["p50_us"] for row in rows if row["batch"] == TARGET_BATCH)
    return int(arguments.check and at_target > TARGET_US)


if __name__ == "__main__":
    raise SystemExit(main())
