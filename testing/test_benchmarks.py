"""Every benchmark that the Makefile names can begin."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("command", "folder"),
    [(r"/python benchmarks/(\w+)\.py", ROOT / "benchmarks"), (r"/python -m (benchmarks[.\w]+)", ROOT)],
    ids=["scripts", "modules"],
)
def test_what_is_run_finds_what_it_imports(command: str, folder: Path) -> None:
    """A script has its own folder on the path and not the repository; a module the reverse."""
    names = re.findall(command, MAKEFILE)
    assert names
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
