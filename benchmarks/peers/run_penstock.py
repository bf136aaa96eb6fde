"""Penstock's core in this process. Usage: run_penstock MODEL [ISA]"""

import sys
import time
from typing import Any

import torch

from peers.loop import run
from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams


class Penstock:
    """See `loop.Engine`; text is nobody's, as in the peers' loops."""

    def __init__(self, model: str, isa: Any = "auto") -> None:
        torch.set_num_threads(1)
        config = EngineArgs(model=model, device="cpu", cpu_isa=isa, kv_cache_memory_bytes=2**26).config()
        executor, blocks = build_executor(config)
        self._core = build_core(config, executor, blocks, epoch=1)
        self._tokens: dict[int, int] = {}

    def add(self, number: int, prompt: list[int], tokens: int) -> None:
        """A request of so many random tokens that generates exactly so many."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        self._core.handle(
            AddRequest(index=number, request_id=str(number), prompt_token_ids=prompt, sampling=sampling, arrival_time=time.time())
        )
        self._tokens[number] = tokens

    def step(self) -> list[tuple[int, int]]:
        """Turns the core once."""
        frame = self._core.step()
        self._core.take_events()
        return [] if frame is None else [(end.index, self._tokens.pop(end.index)) for end in frame.finished]

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    run(lambda: Penstock(*sys.argv[1:]))
