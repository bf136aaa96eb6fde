"""llama.cpp's own benchmark on one thread, for weights of a random Llama that are packed as GGUF."""

import json
import os
import subprocess
import time
from pathlib import Path

from peers import install
from peers.model import Shape, made_of, make_model


class LlamaBench:
    """llama.cpp with weights of one kind.

    Args:
        program: `llama-bench`.
        weights: A GGUF file.
    """

    def __init__(self, program: Path, weights: Path) -> None:
        options = {"model": str(weights), "threads": "1", "repetitions": "1", "n-prompt": "0", "output": "json"}
        self._command = [str(program), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def decode(self, output: int) -> float:
        """CPU seconds a token of one stream."""
        began = time.perf_counter()
        child = subprocess.Popen([*self._command, "--n-gen", str(output)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert child.stdout is not None
        said = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"{self._command[0]} ended with {child.returncode}")
        # It reports wall time: of that, the part in which the process ran.
        share = min((used.ru_utime + used.ru_stime) / (time.perf_counter() - began), 1.0)
        (row,) = json.loads(said)
        return 1e-9 * row["avg_ns"] / output * share


def llama_bench(shape: Shape, kind: str) -> LlamaBench | str:
    """llama.cpp on a model whose layers' matrices are of a GGUF type, such as `Q8_0`; or why it cannot be had."""
    python, program = install.python("llama-cpp"), install.llama_program("llama-bench")
    if python is None or program is None:
        return "not installed: make bench-peers ARGS=llama-cpp"
    model = make_model(shape)
    weights = made_of(model, f"{kind}.gguf", lambda target: [python, "-m", "peers.to_gguf", model, target, kind])
    return weights if isinstance(weights, str) else LlamaBench(program, weights)
