"""transformers' continuous batching on some of the same 256 requests, as the peer that is there without further ado. It has
torch's SDPA only, where FlashAttention is not installed, so that it is a floor rather than a rival."""

import time
from pathlib import Path
from typing import Any

from gpu.engine import SHAPES, TOKENS
from gpu.figures import Row, nano_requests

REQUESTS = 64


def measure(shape: str, device: str = "cuda", *, folder: Path = SHAPES, requests: int = REQUESTS, dtype: str = "bfloat16") -> Row:
    """The figure's value is output tokens a second."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder / shape)
    work = nano_requests()[:requests]
    with torch.device(device):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
    options = GenerationConfig(do_sample=False, eos_token_id=-1)
    manager = network.init_continuous_batching(options)
    manager.start()
    try:
        start = time.perf_counter()
        for number, (prompt, output) in enumerate(work):
            manager.add_request([number % TOKENS] * prompt, request_id=str(number), max_new_tokens=output)
        done = tokens = 0
        while done < len(work):
            result = manager.get_result(timeout=60)
            if result is None or result.error is not None:
                raise RuntimeError(f"no answer: {result and result.error}")
            if result.is_finished():
                done, tokens = done + 1, tokens + len(result.generated_tokens)
        seconds = time.perf_counter() - start
    finally:
        manager.stop(block=True)
    return {"value": tokens / seconds, "bound_by": f"{requests} of the 256 requests", "seconds": seconds, "output_tokens": tokens}
