"""openvino-genai with drafts, in this process. Usage: run_openvino_drafts MODEL none|ngram|draft_model K [DRAFT]; both models
are exports."""

import sys
from collections import deque

import numpy as np
import openvino
import openvino_genai as genai

from peers.drafts_loop import Answers, serve


class Pipeline:
    """Continuous batching; arguments as of the module."""

    def __init__(self, model: str, method: str, drafts: int, draft_model: str | None = None) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1, 8192, 256
        scheduler.enable_prefix_caching = False
        options = {"INFERENCE_NUM_THREADS": 1}
        if method == "ngram":
            options["prompt_lookup"] = True
        if draft_model is not None:
            options["draft_model"] = genai.draft_model(draft_model, "CPU", INFERENCE_NUM_THREADS=1)
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        self._method, self._drafts = method, drafts

    def answer(self, prompts: Answers, streams: int, output: int) -> Answers:
        """Greedy answers, each of so many tokens: prompts are taken in as others end, up to so many at a time."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        if self._method != "none":
            config.num_assistant_tokens = self._drafts
        if self._method == "ngram":
            config.max_ngram_size = 3
        waiting, running, found = deque(enumerate(prompts)), {}, [[] for _ in prompts]
        while waiting or running:
            while waiting and len(running) < streams:
                number, prompt = waiting.popleft()
                running[number] = self._pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), config)
            self._pipeline.step()
            for number, handle in list(running.items()):
                while handle.can_read():
                    for part in handle.read().values():
                        found[number] += part.generated_ids
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    del running[number]
        return found


if __name__ == "__main__":
    model, method, drafts, *draft = sys.argv[1:]
    serve(Pipeline(model, method, int(drafts), *draft).answer)
