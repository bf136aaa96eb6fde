"""CRDs and manifests of others, from the Go modules that publish them.

They are fetched with the programs, and applied by the tests that need them: a cluster begins without.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.cluster.commands import CommandError, TestbedError, run

TOOLS = Path(__file__).parent / "tools"


@dataclass(frozen=True)
class Source:
    """Where a CRD, or a folder of manifests, comes from."""

    pins: str
    """The folder of tools/ whose go.mod pins the module."""
    module: str
    file: str
    """Or the folder, in the module."""

    @property
    def version(self) -> str:
        """As pinned."""
        lines = (TOOLS / self.pins / "go.mod").read_text().splitlines()
        return next(line.split()[-1] for line in lines if line.startswith("require"))


INFERENCE_POOLS: Final = Source(
    "inference", "sigs.k8s.io/gateway-api-inference-extension", "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"
)
HTTP_ROUTES: Final = Source(
    "gateway-api", "sigs.k8s.io/gateway-api", "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"
)
LWS_MANIFESTS: Final = Source("lws", "sigs.k8s.io/lws", "config")
"""All that installs the manager."""
POD_MONITORS: Final = Source(
    "monitoring",
    "github.com/prometheus-operator/prometheus-operator",
    "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
)
PROMETHEUS_RULES: Final = Source(
    "monitoring",
    "github.com/prometheus-operator/prometheus-operator",
    "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
)
SCALED_OBJECTS: Final = Source("keda", "github.com/kedacore/keda/v2", "config/crd/bases/keda.sh_scaledobjects.yaml")
ALL: Final = (INFERENCE_POOLS, HTTP_ROUTES, LWS_MANIFESTS, POD_MONITORS, PROMETHEUS_RULES, SCALED_OBJECTS)


def place(folder: Path, source: Source) -> Path:
    """Where `fetch` puts it, in the folder of the programs."""
    return folder / "crds" / source.version / Path(source.file).name


def missing(folder: Path) -> list[Source]:
    """Those that have not been fetched."""
    return [source for source in ALL if not place(folder, source).exists()]


def fetch(go: list[str], folder: Path, source: Source) -> None:
    """Fetches one of them. Raises TestbedError where that fails."""
    target = place(folder, source)
    try:
        told = run(*go, "-C", str(TOOLS / source.pins), "mod", "download", "-json", source.module, timeout=300)
    except CommandError as problem:
        raise TestbedError(f"{source.file} of {source.module} cannot be fetched: {problem}") from problem
    origin, fresh = Path(json.loads(told)["Dir"]) / source.file, target.with_name(f".{target.name}.new")
    target.parent.mkdir(parents=True, exist_ok=True)
    if origin.is_dir():
        shutil.rmtree(fresh, ignore_errors=True)  # of a fetch that was cut short
        shutil.copytree(origin, fresh, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(origin, fresh)
    fresh.rename(target)
