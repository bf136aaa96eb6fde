"""docs/operator/first-model.md, followed to the letter: its commands, its file, and what it says that they print."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from e2e import models
from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually

PAGE = REPOSITORY / "docs" / "operator" / "first-model.md"
NAME = "qwen"
HUB = "hf://Qwen/Qwen3-0.6B"
"""There is no way out of the test's cluster: the demo model takes its place."""
SMALL = "  engine: {extraArgs: [--kv-cache-memory-bytes=67108864]}\n"


def blocks(kind: str) -> list[str]:
    """The page's fenced blocks of a kind, in order."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[str, str]]:
    """Each command of the page, and what it is said to print."""
    found: list[tuple[str, str]] = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            found.append((command, printed))
    return found


def pattern(printed: str) -> str:
    """What is said to be printed, as a pattern: `…` is anything, and blanks are as many as there may be."""
    return r"\s*".join(".*?".join(map(re.escape, word.split("…"))) for word in printed.split()) + r"\s*"


def test_the_first_model_as_the_manual_has_it(system: System, phases: Phases, tmp_path: Path) -> None:
    cluster = system.cluster
    (resource,) = (block for block in blocks("yaml") if block.startswith("# model.yaml\n"))
    assert HUB in resource
    (tmp_path / "model.yaml").write_text(resource.replace(HUB, f"file://{models.DEMO_MODEL}") + SMALL)
    environment = {**os.environ, **cluster.environment, "COLUMNS": "200"}
    environment["PATH"] = f"{cluster.programs}:{Path(sys.executable).parent}:{environment['PATH']}"
    assert shutil.which("curl", path=environment["PATH"])
    try:
        said = ""  # variables of one command are there for the next
        for command, printed in steps():
            with phases(f"$ {command[:80]}"):
                if re.match(r"[A-Z]+=", command):
                    said += f"{command}\n"
                    continue
                done = run(cluster, f"{said}{command}", environment, tmp_path)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert re.fullmatch(pattern(printed), done.stdout, re.DOTALL), f"{command} printed\n{done.stdout}\nand not\n{printed}"
    finally:
        cluster.kubectl("delete", models.KIND, NAME, "--namespace=default", "--ignore-not-found")
    eventually(lambda: models.expect_gone(cluster, "default", NAME), seconds=120)


def run(cluster: Cluster, script: str, environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """As a person's shell would."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
