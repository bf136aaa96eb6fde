"""Where a benchmark's figures go: `results/NAME-DATE.json`, with the time and the machine that they are of."""

import json
import os
import platform
import sysconfig
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def python_build() -> str:
    """How the interpreter was built: without profile-guided optimization (PGO) it is slower."""
    options = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    kinds = [kind for kind, option in (("PGO", "--enable-optimizations"), ("LTO", "--with-lto")) if option in options]
    return f"{platform.python_compiler()}, {' and '.join(kinds) or 'neither PGO nor LTO'}"


def write_results(name: str, figures: Mapping[str, object]) -> Path:
    """Writes what benchmark `name` has found, over what it found before on the same day; the file, from the repository on."""
    now = datetime.now(UTC)
    head = {"benchmark": name, "time": now.isoformat(timespec="seconds"), "machine": platform.machine()}
    python = {"python": platform.python_version(), "python_build": python_build()}
    machine = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    path = RESULTS / f"{name}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps({**head, **python, **machine, **figures}, indent=2) + "\n")
    return path.relative_to(RESULTS.parent.parent)
