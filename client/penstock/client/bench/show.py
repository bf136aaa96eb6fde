"""The progress bar, the table and the JSON file of a run."""

import argparse
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich import progress
from rich.console import Console
from rich.table import Table

from penstock.client.bench.datasets import DatasetError
from penstock.client.bench.outcome import Outcome
from penstock.client.bench.records import Record

NAMES: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "icl": "inter-chunk latency",
}
_BUSY = 0.7  # share of a core above which the client's own queueing shows in the latencies
_LATE_MS = 10.0
_SEVERAL = 1.05  # tokens a chunk from which gaps between chunks say more than those between tokens


class Progress:
    """A bar on standard error while a run lasts; nothing where that is no terminal."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[said]}"))
        self._bar = progress.Progress(
            *columns,
            progress.TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=2,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, said="")
        self._tokens = self._failed = 0

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, record: Record) -> None:
        """A request has ended."""
        self._tokens += record.output_tokens
        self._failed += record.error is not None
        failed = f", {self._failed} failed" if self._failed else ""
        self._bar.update(self._task, advance=1, said=f"{self._tokens:,} tokens{failed}")


def show(args: argparse.Namespace, outcome: Outcome) -> None:
    """Prints the report on standard output."""
    console = Console(highlight=False)
    report = outcome.report
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    for name, text in _facts(args, outcome):
        facts.add_row(name, text)
    console.print(facts)
    for kind in report.errors:
        message = next(record.message for record in outcome.records if record.error == kind)
        if message:
            console.print(f"{kind}, for example: {message}", style="red", markup=False)
    metrics = list(args.percentile_metrics)
    if report.chunks and report.output_tokens / report.chunks > _SEVERAL and "itl" in metrics and "icl" not in metrics:
        metrics.append("icl")
    table = Table("ms", *[f"p{percentile:g}" for percentile in args.metric_percentiles], box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for metric in metrics:
        if (values := report.latencies.get(metric)) is not None:
            table.add_row(f"{NAMES[metric]} ({metric})", *[f"{value:.2f}" for value in values.percentiles.values()])
    if table.row_count:
        console.print(table)
    for warning in _warnings(args, outcome):
        console.print(warning, style="yellow", markup=False)


def _facts(args: argparse.Namespace, outcome: Outcome) -> Iterator[tuple[str, str]]:
    report = outcome.report
    yield "load", f"{outcome.model}, {args.dataset_name}, {_pace(args)}"
    failed = ", ".join(f"{count} × {kind}" for kind, count in report.errors.items())
    yield "requests", f"{report.completed:,} completed in {report.duration:.2f} s{f'; failed: {failed}' if failed else ''}"
    cached = f", {report.cached_tokens:,} of it cached" if report.cached_tokens is not None else ""
    yield "tokens", f"{report.input_tokens:,} input{cached}; {report.output_tokens:,} output"
    rates = f"{report.request_throughput:.2f} requests/s, {report.output_throughput:,.1f} output tokens/s"
    yield "throughput", f"{rates}, {report.input_throughput:,.1f} input tokens/s"
    if report.goodput is not None:
        bounds = ", ".join(f"{name} ≤ {bound:g} ms" for name, bound in args.goodput)
        yield "goodput", f"{report.goodput:.2f} requests/s within {bounds} ({report.good} of {report.completed})"
    devices = f"{report.cost.devices} device{'s' if report.cost.devices > 1 else ''}"
    cost = report.cost_per_million_output_tokens
    price = f", {cost:,.4g} per million output tokens" if cost is not None else ""
    yield "efficiency", f"{report.output_tokens_per_device_second:,.1f} output tokens per device-second ({devices}){price}"
    if (state := outcome.saturation) is not None:
        gauges = f"running {state.mean_running:.1f}, waiting {state.mean_waiting:.1f} (peak {state.peak_waiting:.0f})"
        yield "server", f"{state.reading}: {state.because}; {gauges}, KV peak {state.peak_kv_usage:.0%}"
    each = f", {outcome.cpu_us_per_token:.0f} µs a token" if outcome.cpu_us_per_token is not None else ""
    yield "client", f"{outcome.cpu_share:.0%} of a core{each}"


def _warnings(args: argparse.Namespace, outcome: Outcome) -> Iterator[str]:
    report = outcome.report
    if outcome.interrupted:
        yield "Interrupted: the numbers are of what was done by then."
    if report.uncounted:
        yield f"{report.uncounted} answers came without usage: each of their chunks counts as one token, their prompts as none."
    if outcome.cpu_share > _BUSY:
        yield "The client was busy: latencies may be its own. Use several clients, or a lower rate."
    late = report.lateness
    if late is not None and args.max_concurrency is None and not _at_once(args):
        worst = max(late.percentiles.values())
        if worst > _LATE_MS:
            yield f"Requests left up to {worst:.0f} ms late: the client did not keep to the rate."
    if outcome.missed_looks:
        yield f"{outcome.missed_looks} readings of the server's gauges failed."


def _at_once(args: argparse.Namespace) -> bool:
    """Whether all requests are due at the start."""
    return args.request_rate == math.inf or (args.request_rate is None and args.dataset_name != "trace")


def _pace(args: argparse.Namespace) -> str:
    cap = f"{args.max_concurrency} at a time" if args.max_concurrency else ""
    if _at_once(args):
        return cap or "all at once"
    speed = f", {args.trace_speedup:g} times as fast" if args.trace_speedup != 1 else ""
    rate = f"the trace's times{speed}" if args.request_rate is None else f"{args.request_rate:g} requests/s"
    return f"{rate}, at most {cap}" if cap else rate


def document(args: argparse.Namespace, outcome: Outcome) -> dict[str, Any]:
    """The run as JSON: what was asked for, the numbers, and with `--save-detailed` those of each request."""
    content: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": outcome.model,
        "flags": {name: _plain(value) for name, value in sorted(vars(args).items()) if name not in ("command", "header")},
        **outcome.report.to_json(),
        "saturation": asdict(outcome.saturation) if outcome.saturation else None,
        "client_cpu_share": outcome.cpu_share,
        "client_cpu_us_per_token": outcome.cpu_us_per_token,
        "interrupted": outcome.interrupted,
    }
    if args.save_detailed:
        content["requests"] = [
            {
                "sent": record.sent - outcome.start,
                "due": record.due - outcome.start,
                "stamps": [stamp - outcome.start for stamp in record.stamps],
                "tokens": record.tokens,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "error": record.error,
                "message": record.message,
            }
            for record in outcome.records
        ]
    return content


def _plain(value: Any) -> Any:
    """JSON knows neither paths nor infinity."""
    if isinstance(value, Path):
        return str(value)
    return "inf" if value == math.inf else value


def result_path(args: argparse.Namespace, served: str) -> Path:
    """Return the path of the JSON result, and create its folder before the run.

    Raises:
        DatasetError: the file cannot be written.
    """
    rate = f"{args.request_rate:g}qps" if args.request_rate else "trace" if args.dataset_name == "trace" else "infqps"
    cap = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    model = re.sub(r"[^\w.-]", "_", served.rpartition("/")[2])
    name = args.result_filename or f"{args.dataset_name}-{rate}{cap}-{model}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path = args.result_dir / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise DatasetError(f"the result cannot be written to {path}: {error.strerror}") from None
    return path


def save(path: Path, args: argparse.Namespace, outcome: Outcome) -> None:
    """Writes the JSON and says where."""
    path.write_text(json.dumps(document(args, outcome), indent=2) + "\n")
    Console(stderr=True, highlight=False).print(f"written to {path}", soft_wrap=True)
