"""Builds llm-d's endpoint picker: `python -m e2e.neighbours.llmd.build` (some minutes; later ones find it there)."""

import sys
from pathlib import Path

from rich.console import Console

from e2e.cluster import build
from e2e.cluster.build import Program
from e2e.cluster.commands import TestbedError

PROGRAMS = {"llm-d-epp": Program("github.com/llm-d/llm-d-router/cmd/epp", Path(__file__).parent)}
COMMAND = "python -m e2e.neighbours.llmd.build"


def picker() -> Path | None:
    """The program; None where it is not built from these very pins."""
    return None if build.missing_programs(PROGRAMS) else build.programs_folder() / "llm-d-epp"


if __name__ == "__main__":
    try:
        build.build(Console(stderr=True), PROGRAMS)
    except TestbedError as error:
        sys.exit(f"build: {error}")
