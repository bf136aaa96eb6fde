"""Which policy routes best: real traces through the gateway's decision core and simulated replicas, beside an oracle.

    make bench-routing                                    # ARGS="--requests 12000 --seeds 5": longer
    python benchmarks/bench_routing.py --policies Cost WeightedScore --loads 0.8
    python benchmarks/bench_routing.py --shapes           # made-up traffic instead, of which the traces have little

Replicas are modelled as 8B models on one H100 each (`penstock.sim`; no GPU is used and no model runs). A load of 1 is the rate at
which the oracle's replicas finish the trace when all of it has arrived at once. A seed names the replicas anew, by which lots
fall otherwise, and begins at another place of the trace. The oracle knows what every replica caches and still has to compute.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from report import write_results
from rich.console import Console
from rich.table import Table
from routing_shapes import SHAPES, shape

from penstock.gateway.picker.policies import POLICIES
from penstock.sim.driver import ORACLE, simulate
from penstock.sim.outcome import Outcome, Slo
from penstock.sim.replica import ReplicaConfig
from penstock.sim.traces import Trace, TraceError, load_azure, load_mooncake, trace_folder

TRACES = trace_folder(Path(__file__))
FILES = {"mooncake": ("mooncake-conversation.jsonl", load_mooncake), "azure": ("azure-2023-code.csv", load_azure)}
LOADS = (0.4, 0.6, 0.8, 0.95)
SHOWN = ("hit_rate", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "goodput", "balance", "preemptions")


def part(trace: Trace, count: int, seed: int, seeds: int) -> Trace:
    """`count` requests of `trace`, those of each seed from another place."""
    start = (len(trace.requests) - count) * seed // max(seeds - 1, 1)
    chosen = trace.requests[start : start + count]
    requests = [msgspec.structs.replace(request, at=request.at - chosen[0].at) for request in chosen]
    return Trace(trace.name, trace.block_size, requests)


def capacity(trace: Trace, replicas: int, config: ReplicaConfig) -> float:
    """Requests a second that the oracle's replicas finish when all have arrived."""
    return len(trace.requests) / simulate(trace.scaled(1.0), ORACLE, replicas, config, Slo()).makespan_s


def measure(trace: Trace, args: argparse.Namespace, console: Console) -> list[dict[str, object]]:
    """One row a load and policy; figures are means over the seeds, with their deviation."""
    config, slo, rows = ReplicaConfig(), Slo(), list[dict[str, object]]()
    count = min(args.requests, len(trace.requests))
    parts = [part(trace, count, seed, args.seeds) for seed in range(args.seeds)]
    rates = [capacity(one, args.replicas, config) for one in parts]
    bound = statistics.fmean(one.infinite_cache_hits() for one in parts)
    console.print(f"{trace.name}: capacity {statistics.fmean(rates):.1f} requests/s, infinite cache {bound:.1%} hits")
    for load in args.loads:
        for policy in args.policies:
            start = time.process_time()
            outcomes = [
                simulate(one.scaled(count / rate / load), policy, args.replicas, config, slo, seed)
                for seed, (one, rate) in enumerate(zip(parts, rates, strict=True))
            ]
            row = {"trace": trace.name, "load": load, "policy": policy, "infinite_hit_rate": bound, **figures(outcomes)}
            rows.append({**row, "cpu_s": round(time.process_time() - start, 1)})
            console.print(f"[dim]{trace.name} {load:.0%} {policy}: {row['ttft_p99']:.2f} s[/dim]")
    return rows


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Mean and standard deviation of each."""
    out: dict[str, float] = {}
    for name in SHOWN:
        values = [getattr(outcome, name) for outcome in outcomes]
        out[name] = round(statistics.fmean(values), 4)
        out[f"{name}_sd"] = round(statistics.stdev(values), 4) if len(values) > 1 else 0.0
    return out


def table(rows: Sequence[dict[str, object]]) -> Table:
    """What is printed."""
    out = Table(title="routing policies, mean ± deviation over seeds; times in seconds")
    for column in ("trace", "load", "policy", "hits", "TTFT p50", "TTFT p99", "ITL p50", "goodput", "balance", "preempted"):
        out.add_column(column, justify="left" if column in ("trace", "policy") else "right")
    for row in rows:
        out.add_row(
            str(row["trace"]),
            f"{row['load']:.0%}",
            str(row["policy"]),
            f"{row['hit_rate']:.1%} ± {row['hit_rate_sd']:.1%}",
            f"{row['ttft_p50']:.2f}",
            f"{row['ttft_p99']:.2f} ± {row['ttft_p99_sd']:.2f}",
            f"{row['itl_p50']:.3f}",
            f"{row['goodput']:.1%} ± {row['goodput_sd']:.1%}",
            f"{row['balance']:.2f}",
            f"{row['preemptions']:.0f}",
        )
    return out


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the trace files")
    parser.add_argument("--requests", type=int, default=1500, help="of each trace, for each seed")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--policies", nargs="+", default=[*POLICIES, ORACLE], choices=[*POLICIES, ORACLE])
    parser.add_argument("--shapes", action="store_true", help="traffic of `routing_shapes.py` instead of the recorded traces")
    args = parser.parse_args()
    console = Console(width=130)
    rows: list[dict[str, object]] = []
    try:
        if args.shapes:
            traces = [shape(name, args.requests * args.seeds) for name in SHAPES]
        else:
            traces = [load(args.traces / file) for file, load in FILES.values()]
    except TraceError as error:
        sys.exit(f"{error}; --traces names the folder with {', '.join(file for file, _ in FILES.values())}")
    for trace in traces:
        rows += measure(trace, args, console)
    console.print(table(rows))
    about = {"requests": args.requests, "replicas": args.replicas, "seeds": args.seeds, "slo": msgspec.to_builtins(Slo())}
    path = write_results("routing-shapes" if args.shapes else "routing", {**about, "rows": rows})
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
