"""Everything that ten minutes on an unknown GPU can tell, in one JSON file: tests, figures, launch tables, traces.

    make gpu-report                                  on a machine with a CUDA device
    make gpu-report ARGS="--seconds 540 --out report/gpu.json"
    make gpu-report ARGS=--dry-run                   the same path on a CPU, with stand-ins

Each item runs in a process of its own, with a time limit, and the file is written after each line that an item says. So a run
that is cut off still leaves facts. A second run with the same file goes on where the first one stopped.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Timer
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"
PACKAGES = ("common", "engine", "kernels", "client")
NEEDED = ("msgspec", "orjson", "zmq", "llguidance", "pytest_asyncio", "pytest_timeout")
"""Modules without which the engine and its tests do not run: some of those that `make wheelhouse` brings."""
CACHE = ROOT / "build/triton-cache"
"""Kernels that were compiled elsewhere."""
SECONDS = 560.0
"""Of everything together: ten minutes less the start and the way back."""
LEAST_S = 8.0
"""An item is not begun for less."""
AT_ONCE = 6
"""Test files beside each other: they share one device, and most of their time is the compiler's."""
MESSAGE = 1500
"""Characters of a failure that are kept."""

Row = dict[str, Any]

TESTS = (
    "kernels/tests/test_triton_attention.py",
    "kernels/tests/test_sampling.py",
    "kernels/tests/test_dependent_launch.py",
    "kernels/tests/test_shared_prefix.py",
    "engine/tests/runner/device/test_cuda_graphs.py",
    "kernels/tests/test_triton_dense.py",
    "kernels/tests/test_triton_eight_bits.py",
    "kernels/tests/test_few_rows.py",
    "engine/tests/runner/test_device_models.py",
    "kernels/tests/test_sampling_extras.py",
    "engine/tests/runner/device/test_device_kernels.py",
    "engine/tests/runner/test_gpu_sampling.py",
    "kernels/tests/test_step_state.py",
    "kernels/tests/test_triton_lora.py",
    "kernels/tests/test_gpu_reference.py",
    "engine/tests/runner/test_dummy_weights.py",
    "engine/tests/models/test_loading.py",
)
"""Files with tests for a GPU, what is most likely to be wrong first."""
MAY_HANG = ("kernels/tests/test_gluon_attention.py",)
"""Those of kernels whose barriers are set by hand: one that hangs is to cost little time."""
TESTS_ALONE = (
    "engine/tests/runner/device/test_device_memory.py",
    "engine/tests/runner/device/test_offload.py",
    "engine/tests/runner/device/test_ceilings.py",
    *MAY_HANG,
)
"""Those that measure memory or bandwidth, and those of kernels that could hang: nothing else may use the device meanwhile."""
COMPILED = (
    "kernels/tests/test_production_tables.py",
    "kernels/tests/test_sampling.py",
    "kernels/tests/test_triton_attention.py",
    "kernels/tests/test_triton_eight_bits.py",
    "kernels/tests/test_shared_prefix.py",
    "kernels/tests/test_gluon_attention.py",
    "kernels/tests/test_few_rows.py",
    "kernels/tests/test_float8_linear.py",
    "kernels/tests/test_triton_quantized.py",
    "kernels/tests/test_triton_dense.py",
    "kernels/tests/test_triton_norm.py",
    "kernels/tests/test_triton_lora.py",
    "kernels/tests/test_triton_experts.py",
    "kernels/tests/test_latent_attention_op.py",
    "kernels/tests/test_sampling_extras.py",
    "kernels/tests/test_step_state.py",
)
"""Files whose kernels are interpreted elsewhere, and compiled here: mostly small cases, of many variants. They come last."""
FIGURES_FIRST = (
    "itl_0.6b",
    "itl_8b",
    "decode_attention",
    "prefill_attention",
    "sampling",
    "host_time",
    "nano_0.6b",
    "dependent_launch",
    "mixed_graphs",
)
SWEEPS = ("decode", "prefill")


@dataclass(frozen=True)
class Item:
    """One thing to find out."""

    part: str
    """`tests`, `figures`, `sweeps` or `traces`."""
    name: str
    limit_s: float
    command: tuple[str, ...]
    """After the interpreter; each line of its output that is a JSON object is a finding."""


def items(dry: bool) -> list[list[Item]]:
    """What is to be found out, in order: the items of a list run beside each other."""
    stand_ins = ("--dry-run",) if dry else ()
    tests = [
        Item("tests", file, 60 if file in MAY_HANG else 240, ("-m", "gpu.test_file", file, *stand_ins))
        for file in (*TESTS, *TESTS_ALONE)
    ]
    beside, alone = tests[: len(TESTS)], tests[len(TESTS) :]
    figures = [Item("figures", name, _limit(name), ("-m", "gpu.run", name, *stand_ins)) for name in FIGURES_FIRST]
    sweeps = [Item("sweeps", name, 60, ("-m", "gpu.sweep", name, *stand_ins)) for name in SWEEPS]
    traces = [Item("traces", "qwen3-0.6b", 60, ("-m", "gpu.trace", "qwen3-0.6b", *stand_ins))]
    compiled = [
        Item("tests", f"{file} --compiled", 240, ("-m", "gpu.test_file", file, "--compiled", *stand_ins)) for file in COMPILED
    ]
    late = [Item("figures", name, _limit(name), ("-m", "gpu.run", name, *stand_ins)) for name in _others()]
    return [beside, *([it] for it in (*figures[:4], *sweeps, *traces, *alone, *figures[4:], *late)), compiled]


def _limit(name: str) -> float:
    from gpu.figures import FIGURES

    return FIGURES[name].limit_s


def _others() -> list[str]:
    from gpu.figures import FIGURES

    return [name for name in FIGURES if name not in FIGURES_FIRST]


class Report:
    """The file, as far as it is known.

    Args:
        path: Written anew, as a whole, with each finding.
        head: What it is about: another `source` or `machine` begins from nothing.
        again: Begin from nothing anyway.
    """

    def __init__(self, path: Path, head: Row, again: bool = False) -> None:
        self._path, self._lock = path, Lock()
        self.found: Row = {**head, "tests": {}, "figures": {}, "sweeps": {}, "traces": {}}
        before = {} if again or not path.exists() else json.loads(path.read_text())
        if all(before.get(key) == head[key] for key in ("machine", "source", "dry_run")):
            self.found |= {part: before.get(part, {}) for part in ("tests", "figures", "sweeps", "traces")}
            self.found["began"] = before.get("began", head["began"])

    def done(self, item: Item) -> bool:
        """Whether an earlier run has ended it."""
        return self.found[item.part].get(item.name, {}).get("ended", False)

    def add(self, item: Item, more: Row) -> None:
        """Writes a finding down. Rows add up, everything else replaces what was there."""
        with self._lock:
            its: Row = self.found[item.part].setdefault(item.name, {})
            rows = [*its.get("rows", []), *more.pop("rows", [])]
            its |= more
            if rows:
                its["rows"] = rows
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps(self.found, indent=1) + "\n")
            beside.replace(self._path)


def run_item(item: Item, limit_s: float, report: Report, environment: dict[str, str]) -> None:
    """Runs one item, and writes down what it says as it says it, and how it ended."""
    began = time.monotonic()
    report.found[item.part].pop(item.name, None)  # of a try that was cut off
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, *item.command]
        process = subprocess.Popen(command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        late = Timer(limit_s, process.kill)
        late.start()
        for line in process.stdout:
            if line.startswith("{"):
                report.add(item, json.loads(line))
        status = process.wait()
        stopped = not late.is_alive()
        late.cancel()
        log.seek(0)
        said = log.read().strip()
    seconds = round(time.monotonic() - began, 1)
    if stopped:
        report.add(item, {"ended": False, "failed": f"stopped after {limit_s:.0f} s", "seconds": seconds, "log": said[-MESSAGE:]})
    elif status:
        last = said.rpartition("\n")[2] or f"exit status {status}"
        report.add(item, {"ended": True, "failed": last, "seconds": seconds, "log": said[-MESSAGE:]})
    else:
        report.add(item, {"ended": True, "seconds": seconds})


def run_items(
    groups: Sequence[Sequence[Item]], seconds: float, report: Report, run: Callable[[Item, float], None], now: Callable[[], float]
) -> list[Item]:
    """Runs what is not done yet, as far as the time goes; returns what it did not suffice for."""
    began, left_out = now(), list[Item]()
    for group in groups:
        todo = [item for item in group if not report.done(item)]

        def one(item: Item) -> None:
            left = seconds - (now() - began)
            if left < LEAST_S:
                left_out.append(item)
            else:
                run(item, min(left, item.limit_s))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, todo))
    return left_out


def write_junit(found: Row, path: Path) -> None:
    """The tests of all files as one JUnit file."""
    root = ET.Element("testsuites")
    for file, its in found["tests"].items():
        suite = ET.SubElement(
            root, "testsuite", name=file, tests=str(its.get("tests", 0)), failures=str(its.get("failed_tests", 0))
        )
        for row in its.get("rows", []):
            case = ET.SubElement(suite, "testcase", classname=file, name=row["test"], time=str(row["seconds"]))
            if row["outcome"] != "passed":
                ET.SubElement(case, row["outcome"], message=row.get("message", ""))
    ET.ElementTree(root).write(path, encoding="unicode", xml_declaration=True)


def source_digest() -> str:
    """Hash of the sources that are measured: there may be no Git where they are."""
    digest = hashlib.sha256()
    for package in ("kernels", "engine"):
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def environment_of(wheels: Path, site: Path) -> dict[str, str]:
    """The environment of the items: the packages of this repository, and wheels where the machine lacks what the engine needs."""
    lacking = any(find_spec(name) is None for name in NEEDED)
    if lacking and any(wheels.glob("*.whl")):
        install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        subprocess.run([sys.executable, *install, *map(str, sorted(wheels.glob("*.whl")))], check=True)
    folders = [*(str(ROOT / package) for package in PACKAGES), str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    cache = {"TRITON_CACHE_DIR": str(CACHE)} if CACHE.is_dir() else {}
    return {**os.environ, **cache, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONUNBUFFERED": "1"}


def machine(environment: dict[str, str]) -> Row | None:
    """The device and the versions of what uses it; None where there is no device. Asked in a process of its own."""
    code = "import json, bench_gpu; print(json.dumps(bench_gpu.machine()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"what is here cannot be found out: {done.stderr.strip()[-MESSAGE:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(found: Row, left_out: Sequence[Item]) -> Iterator[str]:
    """What a person wants to know first."""
    tests = found["tests"].values()
    counts = {name: sum(it.get(name, 0) for it in tests) for name in ("tests", "failed_tests", "skipped_tests")}
    yield f"tests: {counts['tests']}, of which {counts['failed_tests']} failed and {counts['skipped_tests']} were skipped"
    for part in ("tests", "figures", "sweeps", "traces"):
        for name, its in found[part].items():
            if "failed" in its:
                yield f"{part}: {name}: {its['failed']}"
            elif "value" in its:
                yield f"{part}: {name}: {its['value']:.4g}: {its.get('bound_by', '')}"
            elif part == "sweeps" and its.get("best"):
                yield f"{part}: {name}: {its['best']}"
    for item in left_out:
        yield f"{item.part}: {item.name}: no time was left; run the same command again"


def main() -> int:
    """Returns 2 where there is no device, 1 where an item failed or a test did, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of everything together (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the JSON file (default: benchmarks/results/gpu-report-DATE.json)")
    parser.add_argument("--only", nargs="+", choices=("tests", "figures", "sweeps", "traces"), help="these parts alone")
    parser.add_argument("--again", action="store_true", help="begin from nothing, also where the file has findings")
    parser.add_argument("--dry-run", action="store_true", help="go through everything on a CPU, with stand-ins for the device")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build/wheelhouse", help="wheels that the machine lacks")
    args = parser.parse_args()
    say: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731
    with tempfile.TemporaryDirectory() as site:
        environment = environment_of(args.wheels, Path(site) / "site")
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        there = {"device": "none: a dry run"} if args.dry_run else machine(environment)
        if there is None:
            say("gpu-report: torch sees no CUDA device here; --dry-run goes through everything without one")
            return 2
        say(", ".join(f"{key} {value}" for key, value in there.items()))
        now = datetime.now(UTC)
        head = {"benchmark": "gpu-report", "machine": there, "source": source_digest(), "dry_run": args.dry_run}
        out = args.out or HERE / f"results/gpu-report-{now:%Y-%m-%d}.json"
        report = Report(out, {**head, "began": now.isoformat(timespec="seconds")}, args.again)
        groups = [[it for it in group if args.only is None or it.part in args.only] for group in items(args.dry_run)]
        began = time.monotonic()

        def run(item: Item, limit_s: float) -> None:
            say(f"{time.monotonic() - began:4.0f} s  {item.part}: {item.name}")
            run_item(item, limit_s, report, environment)

        left_out = run_items(groups, args.seconds, report, run, time.monotonic)
    write_junit(report.found, out.with_suffix(".junit.xml"))
    for line in summary(report.found, left_out):
        say(line)
    say(f"written to {out}")
    failed = [its for part in ("tests", "figures", "sweeps", "traces") for its in report.found[part].values()]
    return int(any("failed" in its or its.get("failed_tests") for its in failed))


if __name__ == "__main__":
    raise SystemExit(main())
