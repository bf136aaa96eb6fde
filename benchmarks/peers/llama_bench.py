"""llama.cpp's own benchmarks on one thread, for weights that are packed as GGUF."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from peers import install
from peers.model import Shape, made_of, make_model


class LlamaBench:
    """llama.cpp with weights of one kind, and one stream.

    Args:
        program: `llama-bench`.
        weights: A GGUF file.
    """

    def __init__(self, program: Path, weights: Path) -> None:
        self._command = _command(program, model=weights, threads=1, repetitions=1, n_prompt=0, output="json")

    def decode(self, output: int) -> float:
        """CPU seconds a token of one stream."""
        said, share = _run([*self._command, "--n-gen", str(output)])
        (row,) = json.loads(said)
        return 1e-9 * row["avg_ns"] / output * share


class LlamaBatchedBench:
    """llama.cpp with several streams.

    Args:
        program: `llama-batched-bench`.
        weights: A GGUF file.
    """

    def __init__(self, program: Path, weights: Path) -> None:
        self._command = [*_command(program, model=weights, threads=1, threads_batch=1, output_format="jsonl")]

    def decode(self, streams: int, prompt: int, output: int) -> float:
        """Tokens a CPU second that so many streams get, each behind a prompt of so many tokens."""
        sizes = {"-c": streams * (prompt + output), "-npl": streams, "-npp": prompt, "-ntg": output}
        said, share = _run([*self._command, *(word for name, value in sizes.items() for word in (name, str(value)))])
        (row,) = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
        return row["speed_tg"] / share


def _command(program: Path, **options: object) -> list[str]:
    return [str(program), *(word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value)))]


def _run(command: Sequence[str]) -> tuple[str, float]:
    """What a program says, which reports wall time; and in which part of that it ran."""
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    said = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{command[0]} ended with {child.returncode}")
    return said, min((used.ru_utime + used.ru_stime) / (time.perf_counter() - began), 1.0)


def llama_bench(shape: Shape, kind: str) -> LlamaBench | str:
    """llama.cpp on a model whose layers' matrices are of a GGUF type, such as `Q8_0`; or why it cannot be had."""
    found = _found("llama-bench", lambda: make_model(shape), kind)
    return found if isinstance(found, str) else LlamaBench(*found)


def llama_batched_bench(model: Path) -> LlamaBatchedBench | str:
    """llama.cpp on a checkpoint, as it is; or why it cannot be had."""
    found = _found("llama-batched-bench", lambda: model, "BF16")
    return found if isinstance(found, str) else LlamaBatchedBench(*found)


def _found(name: str, make: Callable[[], Path], kind: str) -> tuple[Path, Path] | str:
    """A program and its weights."""
    python, program = install.python("llama-cpp"), install.llama_program(name)
    if python is None or program is None:
        return "not installed: make bench-peers ARGS=llama-cpp"
    model = make()
    weights = made_of(model, f"{kind}.gguf", lambda target: [python, "-m", "peers.to_gguf", model, target, kind])
    return weights if isinstance(weights, str) else (program, weights)
