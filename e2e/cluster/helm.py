"""The real Helm, with a home of its own."""

import os
from collections.abc import Mapping
from pathlib import Path

from e2e.cluster.build import programs_folder
from e2e.cluster.commands import run


class Helm:
    """Runs Helm's commands."""

    def __init__(self, home: Path, environment: Mapping[str, str] | None = None) -> None:
        """
        Args:
            home: A folder for its caches and settings.
            environment: Such as a cluster's; default: none is asked.
        """
        homes = {f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        self._environment = dict(os.environ) | homes | dict(environment or {})

    def __call__(self, *words: str | Path, values: str = "", timeout: float = 125) -> str:
        """Its standard output; `values` is YAML. Raises CommandError with what it said when it fails."""
        given = ("--values=-",) if values else ()
        return run(programs_folder() / "helm", *words, *given, stdin=values, env=self._environment, timeout=timeout)
