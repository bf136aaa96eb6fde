"""A closed loop around an engine in this process: so many requests at a time, the next when one has ended.

Imports nothing but numpy, since it runs in the peers' environments too.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

PROMPT, OUTPUT, VOCAB = 128, 64, 4096


class Engine(Protocol):
    """An engine that is turned by hand."""

    def add(self, number: int, prompt: list[int], tokens: int) -> None:
        """Takes a request: a prompt, and how many tokens to generate, whatever they are."""
        ...

    def step(self) -> list[tuple[int, int]]:
        """Goes on for a step; the numbers of the requests that have ended, and their tokens."""
        ...

    def close(self) -> None:
        """Ends what the engine has begun, such as threads."""
        ...


def closed_loop(engine: Engine, streams: int, seconds: float) -> dict[str, Any]:
    """Keeps `streams` requests running for some seconds and for what has begun by then.

    Returns:
        Tokens a second, and a second of this process's CPU.
    """
    rng = np.random.default_rng(streams)
    number, running, done = 0, 0, 0
    start, cpu = time.perf_counter(), time.process_time()
    while True:
        while running < streams and time.perf_counter() < start + seconds:
            engine.add(number, rng.integers(3, VOCAB, PROMPT).tolist(), OUTPUT)
            number, running = number + 1, running + 1
        if not running:
            break
        for _, tokens in engine.step():
            assert tokens == OUTPUT, f"an answer has {tokens} tokens, not {OUTPUT}"
            running, done = running - 1, done + 1
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"streams": streams, "tok_per_s": round(done * OUTPUT / wall, 1), "tok_per_cpu_s": round(done * OUTPUT / cpu, 1)}


def run(make: Callable[[], Engine]) -> None:
    """Reads a number of streams and seconds from each line of the input, and answers with a line of JSON. A request to warm up
    comes before the first."""
    engine = make()
    closed_loop(engine, 1, 0.01)
    for line in sys.stdin:
        streams, seconds = line.split()
        print(json.dumps(closed_loop(engine, int(streams), float(seconds))), flush=True)
    engine.close()
