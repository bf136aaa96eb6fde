"""From the start of a process to its first token: with caches that are empty, and again with what that has left in them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu.engine import SHAPES, Engine
from gpu.figures import Row
from penstock.engine.roofline import H200

MAX_MODEL_LEN = 8192


def first_token(folder: Path, device: str) -> Row:
    """In this process: how long the engine took to load, and to answer."""
    start = time.perf_counter()
    longest = min(MAX_MODEL_LEN, _longest(folder))
    engine = Engine(folder, ceilings=H200, capture=False, device=device, max_model_len=longest)
    loaded = time.perf_counter()
    engine.add(128, 2)
    engine.until_decoding(1)
    return {"load_s": loaded - start, "first_token_s": time.perf_counter() - loaded}


def _longest(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])


def started(folder: Path, device: str, cache: Path) -> Row:
    """The same in a process of its own, whose start counts."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "gpu.start", str(folder), device]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    parts: Row = json.loads(done.stdout.splitlines()[-1])
    # Its end is not part of it.
    return parts | {"process_s": seconds, "imports_s": max(0.0, seconds - parts["load_s"] - parts["first_token_s"])}


def measure(shape: str, device: str = "cuda", *, folder: Path = SHAPES) -> Row:
    """The figure's value is the warm start, in seconds."""
    with tempfile.TemporaryDirectory() as cache:
        cold = started(folder / shape, device, Path(cache))
        warm = started(folder / shape, device, Path(cache))
    told = (
        f"imports {warm['imports_s']:.1f} s, weights and cache {warm['load_s']:.1f} s, first token {warm['first_token_s']:.2f} s"
    )
    return {"value": warm["process_s"], "bound_by": told, "cold": cold, "warm": warm}


if __name__ == "__main__":
    print(json.dumps(first_token(Path(sys.argv[1]), sys.argv[2])))
