"""Several processes for one model on a CPU, beside one process.

    make bench-parallel

Parts, each in turn with what it is compared to, several times over:
- decode at batch 1 of a model whose weights exceed the caches: one process, two ranks, and two independent processes with half
  of every layer each, at the same time: what two ranks would reach if exchanging cost nothing;
- the share of a step that two ranks spend in exchanges, waits included;
- a small model in the core's process, and in a worker process;
- two pipeline stages with twice the streams of one process, with short answers and with long ones, beside two independent
  processes that have half of the layers each: what two stages would reach if nothing held one up;
- a plan's way to the last of eight ranks, all on one core, and a step of theirs in which they compute nothing;
- how evenly a skewed load of experts lies on ranks: expert after expert, and packed with redundant copies;
- a mixture on two ranks that serve requests: how evenly their load lies before experts have moved, and afterwards.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.engine.args import EngineArgs
from penstock.engine.cache.layout import full_attention
from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from penstock.engine.core.ipc.coupling import Coupling
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.core.plan import SampleInputs, StepPlan, StepResult, empty
from penstock.engine.messages import AddRequest
from penstock.engine.models.layers.placement import Placement
from penstock.engine.parallel.eplb import balancedness, loads_of_ranks, rebalance
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.process_executor import ProcessExecutor
from penstock.engine.sampling import SamplingParams
from penstock.engine.stats import ExpertStats

PROMPT, OUTPUT, LONG_OUTPUT = 16, 40, 128
CAME = "PENSTOCK_BENCH_CAME"
"""Names the file in which `EmptyRunner`s note times."""
PASS_S = "PENSTOCK_BENCH_PASS_S"
"""Seconds that their forward passes take."""
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 8192}
HALF = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
MIXTURE = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 512}
MIXTURE |= {
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}


class EmptyRunner:
    """A rank that applies no plan and computes nothing. It notes when a plan has come, where `CAME` says, and sleeps as long as
    `PASS_S` says: so does a rank that waits for the others at the first sum of a forward pass."""

    def __init__(self, config: EngineConfig, group: Group | None = None) -> None:
        self._rows, self._rank = 0, 0 if group is None else group.rank
        self._came, self._pass_s = np.memmap(os.environ[CAME], np.float64, "r+"), float(os.environ[PASS_S])

    def execute(self, plan: StepPlan) -> None:
        """Sleep."""
        self._came[self._rank] = time.perf_counter()
        self._rows = len(plan.rows)
        if self._pass_s:
            time.sleep(self._pass_s)

    def sample(self, inputs: SampleInputs) -> StepResult:
        """Zeros."""
        return StepResult(inputs.step_id, np.zeros((self._rows, 1), np.int32), np.ones(self._rows, np.int32))


class Engine:
    """A core turned by hand, over made-up weights."""

    def __init__(self, folder: Path, name: str, shape: dict[str, Any], layers: int, **flags: Any) -> None:
        path = folder / f"{name}"
        path.mkdir(exist_ok=True)
        fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64, "num_hidden_layers": layers}
        fixed |= {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 1, "torch_dtype": "bfloat16"}
        (path / "config.json").write_text(json.dumps({**fixed, **shape}))
        given = {
            "load_format": "dummy",
            "kv_cache_memory_bytes": 2**25,
            "enable_prefix_caching": False,
            "device": "cpu",
            "max_model_len": 256,
            **flags,
        }
        config = EngineArgs(model=str(path), **given).config()
        coupling = Coupling(config.parallel) if config.parallel.expert_ranks > 1 else None
        self.executor, blocks = build_executor(config, experts=None if coupling is None else coupling.experts(0))
        self._core = build_core(config, self.executor, blocks, epoch=1)
        self._vocabulary, self._count = shape["vocab_size"], 0

    def rate(self, streams: int, output: int = OUTPUT) -> float:
        """Tokens per second of so many requests that begin together, prompts included."""
        began = time.perf_counter()
        self.decode(streams, output=output)
        return streams * output / (time.perf_counter() - began)

    def decode(self, streams: int = 1, prompt: int = PROMPT, output: int = OUTPUT, kinds: int | None = None) -> float:
        """Seconds of a decode step of so many requests: the median of a run. `kinds` of tokens are in the prompts; None: all."""
        draw = np.random.default_rng(0)
        for _ in range(streams):
            tokens = draw.integers(2, self._vocabulary if kinds is None else 2 + kinds, prompt).tolist()
            sampling = SamplingParams(max_tokens=output, temperature=0.0)
            self._core.handle(AddRequest(self._count, f"r{self._count}", tokens, sampling, arrival_time=time.time()))
            self._count += 1
        found = list[float]()
        while self._core.has_work:
            began = time.perf_counter()
            self._core.step()
            found.append(time.perf_counter() - began)
            self._core.take_events()
        return statistics.median(found[2:-1])


def speed_up(folder: Path, stack: ExitStack, rounds: int) -> dict[str, object]:
    """Two ranks against one process, and against two processes with half of the weights each."""
    one = Engine(folder, "large", LARGE, 12)
    two = Engine(folder, "large", LARGE, 12, tensor_parallel_size=2)
    halves = [Engine(folder, "half", HALF, 12, worker_process=True) for _ in range(2)]
    for engine in (one, two, *halves):
        stack.callback(engine.executor.close)
    assert isinstance(two.executor, ProcessExecutor)
    found: dict[str, list[float]] = {"one process": [], "two ranks": [], "two halves": []}
    shares = list[float]()
    with ThreadPoolExecutor(2) as threads:
        for number in range(rounds + 1):
            single = one.decode()
            before, began = two.executor.progress()[0].seconds, time.perf_counter()
            double = two.decode()
            share = (two.executor.progress()[0].seconds - before) / (time.perf_counter() - began)
            half = statistics.mean(threads.map(Engine.decode, halves))
            if number:  # the first round warms up
                for name, seconds in zip(found, (single, double, half), strict=True):
                    found[name].append(seconds)
                shares.append(share)
    reached = [half / double for half, double in zip(found["two halves"], found["two ranks"], strict=True)]
    return {
        "seconds_a_token": {name: statistics.median(seconds) for name, seconds in found.items()},
        "speed_up": statistics.median(a / b for a, b in zip(found["one process"], found["two ranks"], strict=True)),
        "speed_up_of_halves": statistics.median(a / b for a, b in zip(found["one process"], found["two halves"], strict=True)),
        "share_of_the_speed_up_of_halves": statistics.median(reached),
        "share_of_a_step_in_exchanges": statistics.median(shares),
    }


def pipeline(folder: Path, stack: ExitStack, rounds: int) -> dict[str, object]:
    """Two stages with 16 streams beside one process with 8, for a large model and a small one."""
    found: dict[str, object] = {}
    for name, shape, layers in (("large", LARGE, 12), ("small", SMALL, 4)):
        one, two = Engine(folder, name, shape, layers), Engine(folder, name, shape, layers, pipeline_parallel_size=2)
        halves = [Engine(folder, f"half of the {name}", shape, layers // 2, worker_process=True) for _ in range(2)]
        for engine in (one, two, *halves):
            stack.callback(engine.executor.close)
            engine.rate(8)  # warms up
        with ThreadPoolExecutor(2) as threads:
            for output in (OUTPUT, LONG_OUTPUT):
                rates = list[tuple[float, float, float]]()
                for _ in range(rounds):
                    apart = statistics.mean(threads.map(lambda half: half.rate(8, output), halves))  # noqa: B023  runs at once
                    rates.append((one.rate(8, output), two.rate(16, output), apart))
                found[f"{name}, answers of {output} tokens"] = {
                    "one process, 8 streams": statistics.median(single for single, _, _ in rates),
                    "two stages, 16 streams": statistics.median(double for _, double, _ in rates),
                    "ratio": statistics.median(double / single for single, double, _ in rates),
                    "ratio of two halves apart": statistics.median(half / single for single, _, half in rates),
                }
    return found


def worker_process(folder: Path, stack: ExitStack, rounds: int, streams: Sequence[int]) -> dict[str, object]:
    """A small model in the core's process and in another one, with and without a plan ahead."""
    forms = {
        "inline": Engine(folder, "small", SMALL, 4),
        "worker": Engine(folder, "small", SMALL, 4, worker_process=True),
        "worker, plans ahead": Engine(folder, "small", SMALL, 4, worker_process=True, async_scheduling=True),
    }
    for engine in forms.values():
        stack.callback(engine.executor.close)
    found: dict[str, object] = {}
    for count in streams:
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(rounds):
            for name, engine in forms.items():
                seconds[name].append(engine.decode(count))
        found[str(count)] = {name: statistics.median(each) for name, each in seconds.items()}
    return found


def host_time(folder: Path, world: int, steps: int) -> dict[str, object]:
    """A plan's way to ranks that compute nothing, and back, with all processes on one core.

    The way there is that of steps whose forward pass takes longer: no rank samples before all have the plan. A whole step is one
    with a forward pass of no time.
    """
    there, _ = _steps(folder, world, steps, pass_s=0.003)
    _, whole = _steps(folder, world, steps, pass_s=0.0)
    return {"ranks": world, "seconds_to_the_last": there, "seconds_a_step": whole}


def _steps(folder: Path, world: int, steps: int, pass_s: float) -> tuple[float, float]:
    """Medians of the seconds until a plan has come to the last rank, and until its result is there."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    model = ModelConfig(
        path=Path("/nowhere"), served_names=(), architecture="", dtype="float32", max_model_len=64, eos_token_ids=()
    )
    parallel = ParallelConfig(tensor_parallel_size=world)
    config = EngineConfig(model=model, cache=CacheConfig(), scheduler=SchedulerConfig(), parallel=parallel)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ[CAME], os.environ[PASS_S] = str(folder / f"came-{world}"), str(pass_s)
    came = np.memmap(os.environ[CAME], np.float64, "w+", shape=(world,))
    executor = ProcessExecutor(config, "bench_parallel:EmptyRunner")
    found, there = list[float](), list[float]()
    try:
        for step in range(steps):
            rows = np.arange(32, dtype=np.int32)
            groups = full_attention(16)
            plan = StepPlan(
                step_id=step,
                released=empty(),
                admissions=[],
                append_rows=[empty() for _ in groups],
                append_blocks=[empty() for _ in groups],
                rows=rows,
                num_new_tokens=np.ones(32, np.int32),
                samples=np.ones(32, np.bool_),
            )
            began = time.perf_counter()
            executor.submit(plan, masked=False)
            executor.collect()
            found.append(time.perf_counter() - began)
            there.append(float(came.max()) - began)
    finally:
        executor.close()
        os.sched_setaffinity(0, cores)
    return statistics.median(there), statistics.median(found)


def packing(experts: int = 256, ranks: int = 8, seeds: int = 20) -> list[dict[str, object]]:
    """Greatest load of a rank over the mean, of loads by Zipf's law: the worst of several seeds."""
    rows: list[dict[str, object]] = []
    for redundant in (0, ranks, 4 * ranks):
        before, after, seconds = list[float](), list[float](), list[float]()
        for seed in range(seeds):
            weights = np.random.default_rng(seed).permutation(1e6 / np.arange(1, experts + 1) ** 1.2)
            linear = Placement.linear(experts, ranks, redundant).expert
            began = time.perf_counter()
            placed = rebalance(weights, experts + redundant, ranks)
            seconds.append(time.perf_counter() - began)
            for told, at in ((before, linear), (after, placed)):
                told.append(1 / balancedness(loads_of_ranks(weights, at, ranks)))
        worst = {"before": round(max(before), 2), "after": round(max(after), 3)}
        rows.append({"experts": experts, "ranks": ranks, "redundant": redundant, **worst, "ms": round(1e3 * max(seconds), 1)})
    return rows


def experts_that_move(folder: Path, stack: ExitStack) -> dict[str, object]:
    """Two ranks with a mixture, whose prompts repeat few tokens, so that few experts have most of the work."""
    eplb = {"window_size": OUTPUT, "step_interval": 8 * OUTPUT, "num_redundant_experts": 4}
    flags = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": eplb}
    engine = Engine(folder, "mixture", MIXTURE, 4, **flags)
    stack.callback(engine.executor.close)

    def told() -> ExpertStats:
        return engine.executor.call_beside("expert_stats")[0]

    def round_() -> float:
        return engine.decode(streams=8, prompt=64, output=OUTPUT // 2, kinds=3)

    seconds: dict[str, list[float]] = {"before": [], "meanwhile": [], "after": []}
    for _ in range(3):
        seconds["before"].append(round_())
    before = told()
    assert not before.rebalances, "the first redistribution has come too early"
    while not told().rebalances:
        seconds["meanwhile"].append(round_())
    for _ in range(3):
        seconds["after"].append(round_())
    after = told()
    return {
        "max_over_mean": {"before": 1 / before.balancedness, "after": 1 / after.balancedness},
        "seconds_a_step": {name: statistics.median(each) for name, each in seconds.items()},
        "moved_bytes": after.moved_bytes,
    }


def show(figures: dict[str, Any], console: Console) -> None:
    """Prints a table of each part."""
    table = Table("", "ms a token", title="Decode at batch 1, 378 MB of weights in bfloat16")
    for name, seconds in figures["tensor_parallel"]["seconds_a_token"].items():
        table.add_row(name, f"{1000 * seconds:.2f}")
    console.print(table)
    for name, value in figures["tensor_parallel"].items():
        if isinstance(value, float):
            console.print(f"{name.replace('_', ' ')}: {value:.2f}")
    forms = list(next(iter(figures["worker_process"].values())))
    table = Table("streams", *(f"{form}, ms a step" for form in forms), title="A small model")
    for streams, seconds in figures["worker_process"].items():
        table.add_row(streams, *(f"{1000 * each:.3f}" for each in seconds.values()))
    console.print(table)
    table = Table("model", *next(iter(figures["pipeline"].values())), title="Two pipeline stages, tokens per second")
    for name, row in figures["pipeline"].items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    console.print(table)
    show_host_time(figures, console)
    show_experts(figures, console)


def show_host_time(figures: dict[str, Any], console: Console) -> None:
    """Prints how long plans need to ranks that compute nothing."""
    for one in figures["host_time"]:
        there, whole = 1e6 * one["seconds_to_the_last"], 1e6 * one["seconds_a_step"]
        console.print(f"{one['ranks']} ranks on one core: a plan to the last of them {there:.0f} µs; a whole step {whole:.0f} µs")


def show_experts(figures: dict[str, Any], console: Console) -> None:
    """Prints the tables of the parts on experts."""
    moved = figures["experts_that_move"]
    table = Table("", "before", "meanwhile", "after", title="A mixture on two ranks, 8 streams")
    loads = (f"{moved['max_over_mean'][when]:.3f}" if when != "meanwhile" else "" for when in ("before", "meanwhile", "after"))
    table.add_row("greatest load of a rank over the mean", *loads)
    table.add_row("ms a step", *(f"{1000 * each:.2f}" for each in moved["seconds_a_step"].values()))
    console.print(table)
    console.print(f"moved: {moved['moved_bytes']:,} bytes")
    columns = list(figures["packing"][0])
    table = Table(*columns, title="Experts with skewed loads: the greatest load of a rank over the mean")
    for row in figures["packing"]:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)


def main(rounds: int, streams: Sequence[int], save: bool, only: str | None) -> None:
    """Runs all parts, or `only` those on experts or on the host's time."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if only != "host-time":
            figures["packing"] = packing()
            with ExitStack() as stack:
                figures["experts_that_move"] = experts_that_move(Path(folder), stack)
        if only != "experts":
            figures["host_time"] = [host_time(Path(folder), world, 300) for world in (1, 2, 8)]
        if only is None:
            with ExitStack() as stack:
                figures["tensor_parallel"] = speed_up(Path(folder), stack, rounds)
            with ExitStack() as stack:
                figures["worker_process"] = worker_process(Path(folder), stack, rounds, streams)
            with ExitStack() as stack:
                figures["pipeline"] = pipeline(Path(folder), stack, rounds)
    shows = {None: show, "experts": show_experts, "host-time": show_host_time}
    shows[only](figures, Console())
    if save:
        Console().print(f"written to {write_results('parallel' if only is None else f'parallel-{only}', figures)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", choices=["experts", "host-time"], help="only the parts on this")
    parser.add_argument("--no-save", action="store_true", help="writes no file")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.streams, not arguments.no_save, arguments.only)
