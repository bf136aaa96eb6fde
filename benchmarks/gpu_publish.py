"""Takes the JSON of `make gpu-report` into the documents: which rows of the requirements have run on a GPU, and the figures.

    make gpu-publish ARGS=benchmarks/results/gpu-report-2026-11-23.json

A row of the requirements counts as run when all tests that show it ran and passed. Figures go between the markers of
docs/engine/gpu.md. A dry run is refused.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.figures import FIGURES

ROOT = Path(__file__).resolve().parent.parent
RUNS, PAGE = ROOT / "docs/requirements/gpu-runs.txt", ROOT / "docs/engine/gpu.md"
BEGIN, END = "<!-- figures of gpu-report -->", "<!-- end -->"

Row = dict[str, Any]


def rows_run(found: Row, shown: Mapping[str, Sequence[str]]) -> list[str]:
    """The rows of the requirements all of whose tests passed on the device, sorted.

    Args:
        found: The report.
        shown: Row → tests that show it, `FILE::NAME`; tests of files that the report has nothing of do not count.
    """
    outcomes: dict[str, set[str]] = {}
    for name, its in found["tests"].items():
        file = name.removesuffix(" --compiled")
        for row in its.get("rows", []):
            outcomes.setdefault(f"{file}::{row['test'].partition('[')[0]}", set()).add(row["outcome"])
    return sorted(
        key
        for key, tests in shown.items()
        if (ran := [outcomes[it] for it in tests if it in outcomes]) and set.union(*ran) == {"passed"}
    )


def figures_table(found: Row) -> str:
    """The figures as a table, with the machine and the day."""
    told = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    lines = [
        f"Measured on {found['began'][:10]}: {told}.",
        "",
        "| figure | gate | reached | bound by |",
        "| --- | --- | --- | --- |",
    ]
    for name, figure in FIGURES.items():
        its = found["figures"].get(name, {"failed": "never run"})
        gate = f"{figure.gate.value:g} {figure.gate.unit}" if figure.gate.value else "–"
        reached = f"{its['value']:.4g} {figure.gate.unit}" if "value" in its else f"failed: {its.get('failed', 'not ended')}"
        lines.append(f"| {figure.what} | {gate} | {reached} | {its.get('bound_by', '')} |")
    return "\n".join(lines)


def published(page: str, table: str) -> str:
    """The page with the table between its markers."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"there is no {BEGIN} … {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table}\n\n{END}", page)


def main() -> int:
    """Writes both files; 2 for a dry run's report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("report", type=Path)
    found = json.loads(parser.parse_args().report.read_text())
    if found["dry_run"]:
        sys.stderr.write("gpu-publish: this report is of a dry run, and says nothing of a GPU\n")
        return 2
    sys.path.insert(0, str(RUNS.parent))
    from coverage import read_markers

    known = dict(line.split() for line in RUNS.read_text().splitlines() if line.strip())
    known |= dict.fromkeys(rows_run(found, read_markers()), found["began"][:10])
    RUNS.write_text("".join(f"{key} {day}\n" for key, day in sorted(known.items())))
    PAGE.write_text(published(PAGE.read_text(), figures_table(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
