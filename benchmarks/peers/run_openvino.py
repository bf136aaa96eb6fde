"""openvino-genai's continuous batching in this process. Usage: run_openvino MODEL; MODEL is an export."""

import sys

import numpy as np
import openvino
import openvino_genai as genai

from peers.loop import run


class OpenVINO:
    """See `loop.Engine`. Sizes as Penstock's defaults: prompts whole in one step, no prefix cache to find anything in."""

    def __init__(self, model: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = 8192
        scheduler.max_num_seqs = 256
        scheduler.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1})
        self._running: dict[int, genai.GenerationHandle] = {}
        self._tokens: dict[int, int] = {}

    def add(self, number: int, prompt: list[int], tokens: int) -> None:
        """A request of so many random tokens that generates exactly so many."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self._running[number], self._tokens[number] = self._pipeline.add_request(number, ids, config), 0

    def step(self) -> list[tuple[int, int]]:
        """Turns the core once."""
        self._pipeline.step()
        ended: list[tuple[int, int]] = []
        for number, handle in list(self._running.items()):
            while handle.can_read():
                self._tokens[number] += sum(len(output.generated_ids) for output in handle.read().values())
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del self._running[number]
                ended.append((number, self._tokens.pop(number)))
        return ended

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    run(lambda: OpenVINO(sys.argv[1]))
