"""`penstock serve` as a process, and a random Llama for it to serve."""

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testing.ports import free_ports

START_S = 120.0


def make_llama(path: Path, tokenizer_files: Path, seed: int = 0) -> Path:
    """A random two-layer Llama in float32 with the tokenizer's files beside it; `<|end|>` ends its answers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    for file in tokenizer_files.iterdir():
        shutil.copy(file, path)
    return path


@dataclass
class Server:
    """A running `penstock serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    replay_port: int

    def core_pid(self) -> int:
        """The core: the only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])


def command(model: Path, port: int, events: int, replay: int, *flags: str) -> list[str]:
    """The command line of a small server."""
    ports = ["--port", str(port), "--events-port", str(events), "--replay-port", str(replay)]
    small = ["--kv-cache-memory-bytes", str(4 * 2**20), "--served-model-name", "tiny", "random"]
    return [sys.executable, "-m", "penstock.cli", "serve", str(model), *ports, *small, *flags]


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[Server]:
    """Starts a server, waits until it is ready, and ends it whatever happens."""
    port, events, replay = free_ports(3)
    with log.open("wb") as out:
        process = subprocess.Popen(command(model, port, events, replay, *flags), stdout=out, stderr=out)
        server = Server(process, f"http://127.0.0.1:{port}", log, replay)
        try:
            _wait_ready(server)
            yield server
        finally:
            if process.poll() is None:
                process.kill()  # the core ends with its standard input
            process.wait()


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"the server did not become ready:\n{server.log.read_text()}")
