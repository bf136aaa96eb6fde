"""What an hour of a real trace costs under Penstock's autoscaler, HPA and Knative: SLO attainment against replica-hours.

    make bench-scaling                 # ARGS="--cold-start 120": slower replicas

Replicas are modelled as 8B models on one L40S each (`penstock.sim`; no GPU is used and no model runs), which take a minute to
start. The Azure trace is thickened threefold. Each scaler runs over a range of targets (Penstock: the utilization that demand
may fill; HPA and KPA: requests for each replica), which gives a curve; the second table reads the curves at equal attainment.
`warm N` is Penstock with so many spare replicas, `forecast` Penstock with as many as covered 95 % of the last hour's rises within
a cold start. A replica counts from its creation to its end, cold start and drain included. HPA and KPA follow their documented
rules and defaults.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.operator.autoscale.limits import Limits, Settings
from penstock.sim.elastic import Scaled, Scaler, run
from penstock.sim.outcome import Slo
from penstock.sim.replica import ReplicaConfig
from penstock.sim.scalers import ForecastScaler, HpaScaler, KpaScaler, PenstockScaler
from penstock.sim.timing import StepTime
from penstock.sim.traces import Trace, TraceError, load_azure, load_mooncake, trace_folder

REPOSITORY = Path(__file__).parent.parent
TRACES = trace_folder(Path(__file__))
L40S = ReplicaConfig(
    time=StepTime(base_s=0.022, prefill_token_s=88e-6, row_s=30e-6, context_token_s=152e-9),
    max_num_batched_tokens=2048,
    kv_tokens=213_000,
)
SLO = Slo(ttft_s=5.0, itl_s=0.1)
MOST = 40
TARGETS = {
    "Penstock": (0.15, 0.25, 0.35, 0.5, 0.65, 0.8),
    "warm 4": (0.25, 0.35, 0.5, 0.65, 0.8),
    "warm 8": (0.35, 0.5, 0.65, 0.8, 0.9),
    "forecast": (0.35, 0.5, 0.65, 0.8, 0.9),
    "HPA": (0.5, 1.0, 2.0, 4.0, 6.0, 9.0),
    "KPA": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
}
COLOURS = {
    "Penstock": "#0b7285",
    "warm 4": "#66a80f",
    "warm 8": "#2b8a3e",
    "forecast": "#868e96",
    "HPA": "#e8590c",
    "KPA": "#862e9c",
}
Row = dict[str, object]


@cache
def trace(name: str, folder: Path) -> Trace:
    """A trace at the rate at which it is replayed."""
    if name == "mooncake":
        return load_mooncake(folder / "mooncake-conversation.jsonl")
    return load_azure(folder / "azure-2023-code.csv").thickened(3)


def scaler(name: str, target: float) -> Scaler:
    """One of them."""
    limits = Limits(1, MOST, target_utilization=target)
    if name == "forecast":
        return ForecastScaler(limits, Settings(), 0.95)
    if name == "Penstock" or name.startswith("warm "):
        return PenstockScaler(replace(limits, warm=int(name.partition(" ")[2] or 0)), Settings())
    return (HpaScaler if name == "HPA" else KpaScaler)(target, 1, MOST)


def measure(job: tuple[str, str, float, float, Path]) -> Row:
    """One run."""
    name, who, target, cold_start_s, folder = job
    scaled: Scaled = run(trace(name, folder), scaler(who, target), L40S, SLO, cold_start_s=cold_start_s, first=4)
    return {"trace": name, "scaler": who, "target": target, **msgspec.to_builtins(scaled)}


def frontier(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(attainment, replica-hours) of the runs that no other beats in both, by rising attainment."""
    points = sorted((float(str(row["replica_hours"])), float(str(row["attained"]))) for row in rows)
    best: list[tuple[float, float]] = []
    for hours, attained in points:
        if not best or attained > best[-1][0]:
            best.append((attained, hours))
    return best


def hours_at(curve: Sequence[tuple[float, float]], attained: float) -> float | None:
    """Replica-hours at an attainment, read between the runs on either side; None beyond what was reached."""
    for (low, cheap), (high, dear) in pairwise(curve):
        if low <= attained <= high:
            return cheap + (dear - cheap) * (attained - low) / (high - low)
    return None


def compared(rows: Sequence[Row]) -> list[Row]:
    """Replica-hours of each scaler at equal attainment, by trace."""
    out: list[Row] = []
    for name in ("mooncake", "azure"):
        curves = {who: frontier([row for row in rows if (row["trace"], row["scaler"]) == (name, who)]) for who in TARGETS}
        for attained in (0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97):
            hours = {who: hours_at(curve, attained) for who, curve in curves.items()}
            if hours["Penstock"] is not None:
                out.append({"trace": name, "attained": attained, **hours})
    return out


def picture(rows: Sequence[Row]) -> str:
    """Both traces as SVG: attainment to the right, replica-hours upwards; each run a dot, each scaler a line."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="960" height="420" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="960" height="420" fill="white"/>')
    for at, name in enumerate(("mooncake", "azure")):
        its = [row for row in rows if row["trace"] == name]
        top = max(float(str(row["replica_hours"])) for row in its) * 1.05
        left, width, height = 60 + at * 480, 380, 320

        def x(attained: float, left: int = left, width: int = width) -> float:
            return left + (max(attained, 0.5) - 0.5) / 0.5 * width

        def y(hours: float, top: float = top, height: int = height) -> float:
            return 40 + height * (1 - hours / top)

        parts.append(f'<text x="{left}" y="24" font-size="15">{name}: replica-hours against SLO attainment</text>')
        for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            parts.append(f'<line x1="{x(share)}" x2="{x(share)}" y1="40" y2="{40 + height}" stroke="#e9ecef"/>')
            parts.append(f'<text x="{x(share)}" y="{58 + height}" text-anchor="middle">{share:.0%}</text>')
        for step in range(6):
            hours = top * step / 5
            parts.append(f'<text x="{left - 8}" y="{y(hours) + 4:.0f}" text-anchor="end">{hours:.0f}</text>')
        for number, (who, colour) in enumerate(COLOURS.items()):
            points = [(float(str(r["attained"])), float(str(r["replica_hours"]))) for r in its if r["scaler"] == who]
            shown = [(x(attained), y(hours)) for attained, hours in points if attained >= 0.5]
            line = [
                (x(attained), y(hours)) for attained, hours in frontier([r for r in its if r["scaler"] == who]) if attained >= 0.5
            ]
            parts.append(f'<polyline fill="none" stroke="{colour}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in line)}"/>')
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in shown]
            parts.append(f'<text x="{left + number * 90}" y="{86 + height}" fill="{colour}">● {who}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def tables(rows: Sequence[Row]) -> list[Table]:
    """What is printed."""
    runs = Table(title=f"an hour of each trace; SLO: first token in {SLO.ttft_s:g} s and {SLO.itl_s * 1000:g} ms between tokens")
    for column in ("trace", "scaler", "target", "attained", "TTFT p95", "replica-hours", "changes", "most"):
        runs.add_column(column, justify="left" if column in ("trace", "scaler") else "right")
    for row in rows:
        figures = (f"{row['target']:g}", f"{row['attained']:.1%}", f"{row['ttft_p95']:.1f}", f"{row['replica_hours']:.1f}")
        runs.add_row(str(row["trace"]), str(row["scaler"]), *figures, str(row["changes"]), str(row["most"]))
    equal = Table(title="replica-hours at equal attainment, read from the curves; –: not reached by any target")
    for column in ("trace", "attained", *TARGETS):
        equal.add_column(column, justify="right")
    for row in compared(rows):
        cells = ["–" if row[who] is None else f"{row[who]:.1f}" for who in TARGETS]
        equal.add_row(str(row["trace"]), f"{row['attained']:.0%}", *cells)
    return [runs, equal]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the trace files")
    parser.add_argument("--cold-start", type=float, default=60.0, metavar="SECONDS", help="default: %(default)s")
    args = parser.parse_args()
    jobs = [
        (name, who, target, args.cold_start, args.traces)
        for name in ("mooncake", "azure")
        for who, targets in TARGETS.items()
        for target in targets
    ]
    console = Console(width=130)
    try:
        with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
            rows = list(pool.map(measure, jobs))
    except TraceError as error:
        sys.exit(f"{error}; --traces names the folder with the traces")
    for table in tables(rows):
        console.print(table)
    about = {"cold_start_s": args.cold_start, "slo": msgspec.to_builtins(SLO)}
    path = write_results("scaling", {**about, "rows": rows, "compared": compared(rows)})
    (REPOSITORY / path).with_suffix(".svg").write_text(picture(rows))
    console.print(f"written to {path} and {path.with_suffix('.svg').name}")


if __name__ == "__main__":
    main()
