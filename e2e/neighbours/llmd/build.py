"""Builds llm-d's endpoint picker and its sidecar: `python -m e2e.neighbours.llmd.build`, some minutes the first time."""

import sys
from pathlib import Path
from typing import Final

from rich.console import Console

from e2e.cluster import build
from e2e.cluster.build import Program
from e2e.cluster.commands import TestbedError

MODULE = Path(__file__).parent / "module"
"""By itself, since each file beside the pins is part of the build's stamp."""
_COMMANDS: Final = {"llm-d-epp": "epp", "llm-d-pd-sidecar": "pd-sidecar"}
PROGRAMS = {name: Program(f"github.com/llm-d/llm-d-router/cmd/{it}", MODULE) for name, it in _COMMANDS.items()}
COMMAND = "python -m e2e.neighbours.llmd.build"


def built(name: str) -> Path | None:
    """A program of `PROGRAMS`; None where it is not built from these very pins."""
    return None if build.missing_programs({name: PROGRAMS[name]}) else build.programs_folder() / name


if __name__ == "__main__":
    try:
        build.build(Console(stderr=True), PROGRAMS)
    except TestbedError as error:
        sys.exit(f"build: {error}")
