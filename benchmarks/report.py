"""Where a benchmark's figures go: `results/NAME-DATE.json`, with the time and the machine that they are of."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def write_results(name: str, figures: Mapping[str, object]) -> Path:
    """Writes what benchmark `name` has found, over what it found before on the same day; the file, from the repository on."""
    now = datetime.now(UTC)
    head = {"benchmark": name, "time": now.isoformat(timespec="seconds"), "machine": platform.machine()}
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    path = RESULTS / f"{name}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps({**head, **machine, **figures}, indent=2) + "\n")
    return path.relative_to(RESULTS.parent.parent)
