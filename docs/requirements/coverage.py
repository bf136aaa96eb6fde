"""`make requirements`: which requirement rows have a test, by section, and which have none.

Rows are the tables of the Markdown files beside this script; a test shows rows by `@pytest.mark.req("SCH-06", …)`. Markers are
read from the source, not by importing it, so this takes a second. Rows that only a GPU can show count as "never run" until a
run on one is recorded in `gpu-runs.txt` (lines `ID YYYY-MM-DD`).
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
COMPONENTS = (
    "common",
    "engine",
    "kernels",
    "gateway",
    "operator",
    "client",
    "sim",
    "conformance",
    "e2e",
    "examples",
    "monitoring",
    "testing",
)
ROW = re.compile(r"^\| ([A-Z]+-\d+)\*? \|.*\| (.*) \|$")


class Row(NamedTuple):
    """One requirement."""

    section: str
    gpu_only: bool


def read_rows() -> dict[str, Row]:
    """The rows by ID, in the order of the files."""
    rows: dict[str, Row] = {}
    for file in sorted(HERE.glob("*.md")):
        section = ""
        for line in file.read_text().splitlines():
            if line.startswith("## "):
                section = f"{file.stem}: {line[3:]}"
            elif match := ROW.match(line):
                tags = set(re.findall(r"\[([^\]]*)\]", match[2]))
                where = {word.strip() for tag in tags for word in tag.split(",")}
                rows[match[1]] = Row(section, bool(where & {"gpu", "multi"}) and not where & {"cpu", "http"})
    return rows


def read_markers() -> dict[str, list[str]]:
    """Requirement ID → the tests that say they show it."""
    shown: dict[str, list[str]] = defaultdict(list)
    files = [file for component in COMPONENTS for file in sorted((REPOSITORY / component).rglob("test_*.py"))]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("mark.req"):
                    for argument in decorator.args:
                        shown[ast.literal_eval(argument)].append(f"{file.relative_to(REPOSITORY)}::{node.name}")
    return shown


def main() -> int:
    """Prints the report; 1 where a marker names a row that does not exist."""
    console = Console()
    rows, shown = read_rows(), read_markers()
    gpu_runs = dict(line.split() for line in (HERE / "gpu-runs.txt").read_text().splitlines() if line.strip())
    table = Table("section", "rows", "with a test", "%", "none yet", title="Requirement rows and the tests that show them")
    for section in dict.fromkeys(row.section for row in rows.values()):
        here = [key for key, row in rows.items() if row.section == section and not row.gpu_only]
        missing = [key for key in here if key not in shown]
        done = len(here) - len(missing)
        table.add_row(section, str(len(here)), str(done), f"{100 * done / max(len(here), 1):.0f}", " ".join(missing))
    console.print(table)
    gpu = [key for key, row in rows.items() if row.gpu_only]
    console.print(f"\nRows that only a GPU can show ({len(gpu)}):")
    console.print(", ".join(f"{key} run on {gpu_runs[key]}" if key in gpu_runs else f"{key} never run" for key in gpu))
    everywhere = [key for key, row in rows.items() if not row.gpu_only]
    console.print(f"\n{sum(key in shown for key in everywhere)} of {len(everywhere)} rows that need no GPU have a test.")
    unknown = sorted(set(shown) - set(rows))
    for key in unknown:
        console.print(f"[red]{key} is no row of docs/requirements, but is claimed by {', '.join(shown[key])}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
