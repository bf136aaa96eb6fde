"""The examples of docs/engine/python.md, run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/engine/python.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["LLM", "AsyncLLM"])
def test_an_example_prints_the_answer(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Deserialize s (a str, bytes or bytearray instance" in done.stdout


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`penstock --help` imports it."""
    code = "import sys, penstock.engine; print(sorted({'torch', 'numpy', 'aiohttp', 'tokenizers', 'zmq'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
