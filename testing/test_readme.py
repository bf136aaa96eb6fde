"""What the README shows works: its resource, its `make` targets and its Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.operator.acceptance import accept

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    """The only code block of that language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return found


def test_the_operator_accepts_its_model() -> None:
    model, refusal = accept({**yaml.safe_load(block("yaml")), "metadata": {"name": "qwen", "namespace": "default", "uid": "u"}})
    assert model is not None and refusal is None, refusal


def test_its_make_targets_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", README))
    targets = set(re.findall(r"^([a-z][\w -]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert "demo" in named
    assert named <= {name for line in targets for name in line.split()}


@pytest.mark.slow
def test_its_python_answers() -> None:
    done = subprocess.run([sys.executable, "-c", block("python")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("json.loads: Deserialize")
