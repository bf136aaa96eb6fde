"""Builds the gateways and suites of others that `make neighbours` runs, from their Go modules: `python -m e2e.neighbours.build`.

They are kept with the programs of the cluster tier, which are built too. Half an hour on two busy cores the first time.
"""

import sys

from rich.console import Console

from e2e.cluster import build, crds
from e2e.cluster.commands import TestbedError
from e2e.neighbours.gaie import suite
from e2e.neighbours.istio import install

COMMAND = "python -m e2e.neighbours.build"
GATEWAY_API = crds.Source("gateway-api", "sigs.k8s.io/gateway-api", "config/crd/standard")
PROGRAMS = build.PROGRAMS | install.PROGRAMS | suite.PROGRAMS


def missing() -> list[str]:
    """What has not been built yet."""
    folder = build.programs_folder()
    sources = [source for source in (*crds.ALL, GATEWAY_API) if not crds.place(folder, source).exists()]
    return [*build.missing_programs(PROGRAMS), *(source.module for source in sources)]


def main() -> None:
    """Builds what is missing."""
    console = Console(stderr=True)
    folder = build.build(console, PROGRAMS)
    if not crds.place(folder, GATEWAY_API).exists():
        crds.fetch(build.find_go(console), folder, GATEWAY_API)


if __name__ == "__main__":
    try:
        main()
    except TestbedError as error:
        sys.exit(f"{COMMAND}: {error}")
