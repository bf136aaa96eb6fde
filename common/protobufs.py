"""How the build of a package gets its private copy of Envoy's API: from `protogen.py`, in an environment with pinned versions."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def generator() -> list[str]:
    """The packages that `generate` needs, pinned as `make setup` has them."""
    lines = (ROOT / "requirements/protogen.txt").read_text().splitlines()
    return [line.removesuffix("\\").strip() for line in lines if line and not line.startswith(("#", " "))]


def generate(package: Path) -> None:
    """Writes the package, in an environment that has `generator()`."""
    subprocess.run([sys.executable, ROOT / "common/protogen.py", package], check=True)
