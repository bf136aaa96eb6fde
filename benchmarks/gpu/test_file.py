"""The GPU tests of one file, in this process: `python -m gpu.test_file FILE`, from the folder above; a line of JSON for each.

With `--compiled`: those that interpret kernels where there is no GPU.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
MESSAGE = 1500
"""Characters of a failure that are kept."""
TIMEOUT_S = 120
_OUTCOMES = {"passed": "passed", "failed": "failure", "skipped": "skipped"}
"""pytest's words and JUnit's."""


class Lines:
    """A plug-in of pytest that prints how each test ended, as soon as it has."""

    def __init__(self, to: TextIO) -> None:
        self._to = to
        self._counts = {"tests": 0, "failed_tests": 0, "skipped_tests": 0}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for the set-up, the call and the end of each test."""
        if report.when == "call" or report.outcome == "failed" or (report.when == "setup" and report.outcome == "skipped"):
            self.say(report.nodeid.partition("::")[2], report.outcome, report.duration, str(report.longrepr))

    def say(self, test: str, outcome: str, seconds: float, words: str) -> None:
        """Prints one test's line, with the counts so far."""
        row: dict[str, Any] = {"test": test, "outcome": _OUTCOMES[outcome], "seconds": round(seconds, 2)}
        if outcome != "passed":
            row["message"] = words[-MESSAGE:]
        self._counts["tests"] += 1
        self._counts["failed_tests"] += outcome == "failed"
        self._counts["skipped_tests"] += outcome == "skipped"
        print(json.dumps({"rows": [row], **self._counts}), file=self._to, flush=True)


def main(file: str, mark: str = "gpu", dry: bool = False) -> int:
    """Runs the file's tests. A test that fails is a finding; only tests that cannot be run at all are an error."""
    with os.fdopen(os.dup(1), "w") as to:
        os.dup2(2, 1)  # what pytest and the tests themselves print is for the log
        return _run(file, mark, Lines(to), dry)


def _run(file: str, mark: str, lines: Lines, dry: bool) -> int:
    if dry:
        lines.say("a stand-in", "passed", 0.0, "")
        return 0
    import pytest

    os.chdir(ROOT)
    options = ["-m", mark, "-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", file]
    status = pytest.main(options, plugins=[lines])
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED) else int(status)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], "compiled" if "--compiled" in sys.argv else "gpu", "--dry-run" in sys.argv))
