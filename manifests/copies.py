"""Copies of manifests for what must hold them itself: the chart and the wheel. `make crds` and `make monitoring` write them.

They are no symbolic links, which archives, wheels and some checkouts lose.
"""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FOLDERS: Final = {
    "charts/penstock/files/crds": "manifests/crds/*.yaml",
    "charts/penstock/files/rbac": "manifests/rbac/*.yaml",
    "charts/penstock/files/monitoring/dashboards": "manifests/monitoring/dashboards/*.json",
    "charts/penstock/files/monitoring/rules": "manifests/monitoring/rules/*.yaml",
    "operator/penstock/operator/dashboards/json": "manifests/monitoring/dashboards/*.json",
}
"""Each folder of copies, and the files that it holds."""


def copies() -> dict[Path, bytes]:
    """What every copy must hold, by its path."""
    return {ROOT / folder / it.name: it.read_bytes() for folder, files in FOLDERS.items() for it in ROOT.glob(files)}


def write() -> None:
    """Writes all copies, and removes those whose originals are gone."""
    wanted = copies()
    for folder in FOLDERS:
        (ROOT / folder).mkdir(parents=True, exist_ok=True)
        for old in set((ROOT / folder).iterdir()) - wanted.keys():
            old.unlink()
    for path, content in wanted.items():
        path.write_bytes(content)


if __name__ == "__main__":
    write()
