"""The sources as somebody else gets them, for tests that build from them."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def clone(to: Path) -> Path:
    """Copies what a commit of the working tree would hold, and nothing that is generated; returns the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # it may be deleted and not yet committed
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def package_index() -> dict[str, str]:
    """The variables that say where this machine gets packages from, if not from PyPI itself."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(("UV_", "PIP_", "SSL_")) or "_proxy" in name.lower()
    }
