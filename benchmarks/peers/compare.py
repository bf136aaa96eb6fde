"""Engines in process on the benchmark's model: which of them are there, and what each gets from a second of CPU."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO, Any

from peers import install
from peers.model import made_of
from penstock.kernels.cpu.isa import Isa

FOLDER = Path(__file__).parent.parent
PENSTOCK = "penstock, in process"
Command = list[str | Path]
Row = dict[str, Any]


def openvino(model: Path, isa: Isa | None) -> Command | str:
    """The command of openvino-genai on the model's export; or why there is none."""
    python, exporter = install.python("openvino"), install.python("openvino-export")
    if python is None or exporter is None:
        return 'not installed: make bench-peers ARGS="openvino openvino-export"'
    tool, task = exporter.with_name("optimum-cli"), ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    export = made_of(model, "openvino", lambda target: [tool, "export", "openvino", *task, "--model", model, target])
    return export if isinstance(export, str) else [python, "-m", "peers.run_openvino", export]


def transformers(model: Path, isa: Isa | None) -> Command | str:
    """The command of transformers' continuous batching."""
    return [sys.executable, "-m", "peers.run_transformers", model]


def penstock(model: Path, isa: Isa | None) -> Command | str:
    """The command of our own core."""
    return [sys.executable, "-m", "peers.run_penstock", model, "auto" if isa is None else isa.name]


ENGINES: dict[str, Callable[[Path, Isa | None], Command | str]] = {
    PENSTOCK: penstock,
    "openvino-genai": openvino,
    "transformers, continuous": transformers,
}


class Process:
    """An engine in a process of its own, on one thread, that measures what it is told to; see `loop.run`."""

    def __init__(self, command: Command, isa: Isa | None, errors: IO[str]) -> None:
        self._errors = errors
        environment = {**os.environ, **(isa.environment if isa else {}), "PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)

    def measure(self, streams: int, seconds: float) -> Row:
        """A row. Raises RuntimeError where the process has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):
            stdin.write(f"{streams} {seconds}\n")
            stdin.flush()
        for line in stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._errors.seek(0)
        said = re.sub(r"(?s)Traceback.*?\n(?=\S)", "", self._errors.read()).strip()  # a stack names folders of the machine
        raise RuntimeError(f"an engine ended with {self._process.wait()}: {said[-500:]}")

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


def bench_in_process(
    model: Path, streams: Sequence[int], seconds: float, isa: Isa | None, say: Callable[[str], None]
) -> tuple[list[Row], dict[str, str]]:
    """A row for each engine and number of streams, the engines in turn at each number; and the absent ones with the reason.

    Args:
        model: The checkpoint.
        streams: How many requests at a time.
        seconds: Of each row.
        isa: The instruction set that torch and oneDNN, and with them the peers, are kept to; None: whatever they choose.
        say: Told what goes on.
    """
    absent: dict[str, str] = {}
    rows: list[Row] = []
    with ExitStack() as stack:
        found: dict[str, Process] = {}
        for name, make in ENGINES.items():
            say(f"preparing {name}")
            command = make(model, isa)
            if isinstance(command, str):
                absent[name] = command
            else:
                errors = stack.enter_context(tempfile.TemporaryFile("w+"))
                found[name] = stack.enter_context(closing(Process(command, isa, errors)))
        for count in streams:
            for name, process in list(found.items()):
                say(f"{name}, {count} streams")
                try:
                    rows.append({"server": name, **process.measure(count, seconds)})
                except RuntimeError as error:
                    if name == PENSTOCK:
                        raise
                    absent[name] = str(error)
                    del found[name]
    return rows, absent
