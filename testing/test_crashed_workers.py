"""The run of the tests itself survives the death of a worker: another one runs what it left."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CRASH_ONCE = """
import os, pathlib
def test_that_crashes():
    once = pathlib.Path(__file__).with_name("once")
    if not once.exists():
        once.touch()
        os._exit(1)
"""
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("left", "passed", "reruns"), [("", 9, ["--reruns", "1"]), ("def test_left(): pass", 10, [])], ids=["none left", "one left"]
)
def test_what_a_worker_left_is_run(tmp_path, left, passed, reruns):
    """The test that it died of stays a failure, and is run once more with those that are left of its file.

    It is left to try alone, though it passed with the worker that took over.
    """
    shutil.copy(ROOT / "conftest.py", tmp_path)
    for letter in "abcdefgh":
        (tmp_path / f"test_{letter}.py").write_text("import time\ndef test_one(): time.sleep(0.2)")
    (tmp_path / "test_last.py").write_text(CRASH_ONCE + left)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-n", "2", "--dist", "loadfile", *reruns, "."]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100).stdout
    assert f"1 failed, {passed} passed" in output, output
    failed = json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text())
    assert list(failed) == ["test_last.py::test_that_crashes"]
