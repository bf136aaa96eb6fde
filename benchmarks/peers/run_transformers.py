"""transformers' continuous batching in this process. Usage: run_transformers MODEL"""

import sys

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from peers.loop import run


class Transformers:
    """See `loop.Engine`. Its loop runs in a thread of its own; a step here is to wait for an answer."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        # Left alone it takes all the memory there is. Pages of its own size, enough for all streams; no prefixes to share.
        sizes = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=8192, allow_block_sharing=False)
        options = GenerationConfig(do_sample=False, eos_token_id=-1)
        self._manager = network.init_continuous_batching(options, sizes)
        self._manager.start()

    def add(self, number: int, prompt: list[int], tokens: int) -> None:
        """A request of so many random tokens that generates exactly so many."""
        self._manager.add_request(prompt, request_id=str(number), max_new_tokens=tokens)

    def step(self) -> list[tuple[int, int]]:
        """Turns the core once."""
        output = self._manager.get_result(timeout=60)
        assert output is not None and output.error is None, f"no answer: {output and output.error}"
        return [(int(output.request_id), len(output.generated_tokens))] if output.is_finished() else []

    def close(self) -> None:
        """Ends the thread."""
        self._manager.stop(block=True)


if __name__ == "__main__":
    run(lambda: Transformers(sys.argv[1]))
