"""What `make setup` says of the gateway's compiled parts, which it does not build."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from testing.sources import ROOT


def said(folder: Path, *programs: str) -> str:
    """What `make setup` prints in an environment that is set up, with nothing but these programs on the path."""
    for name in ("bin/uv", "protos", ".setup"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    found = folder / "path"
    found.mkdir()
    for program in programs:
        (found / program).write_text("#!/bin/sh\nexit 1\n")
        (found / program).chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    command = [make, "--no-print-directory", "setup", f"VENV={folder}", f"PROTOS={folder / 'protos'}"]
    environment = {**os.environ, "PATH": str(found)}
    environment.pop("MAKEFLAGS", None)
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def test_where_cargo_is_installed_it_names_what_builds_them(tmp_path: Path) -> None:
    assert said(tmp_path, "cargo") == 'the gateway\'s picks are made in Python: "make native" builds their compiled form\n'


def test_where_cargo_is_missing_it_says_so(tmp_path: Path) -> None:
    words = said(tmp_path)
    assert "picks are made in Python" in words and "needs cargo, which is not installed" in words
    assert "make native" not in words


@pytest.mark.parametrize("programs", [(), ("cargo",)])
def test_where_they_are_built_it_says_nothing(tmp_path: Path, programs: tuple[str, ...]) -> None:
    (tmp_path / ".native").touch()
    assert said(tmp_path, *programs) == ""
