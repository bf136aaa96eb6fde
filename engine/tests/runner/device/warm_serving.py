"""Serves random requests on a device that is not there, and prints what was compiled for them.

    python warm_serving.py MODEL FLAGS…    one line of JSON: the names of the variants that serving launches, and of those of them
                                           that were not in the cache

A program of its own, since a process interprets Triton's kernels or compiles them, never both.
"""

import json
import sys

import numpy as np

from penstock.engine.args import EngineArgs
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import executor_of
from penstock.engine.messages import AddRequest
from penstock.engine.runner.device.warm import MetaRunner
from penstock.engine.sampling import SamplingParams
from penstock.engine.warm import parser
from penstock.kernels.compile_only import compile_only

REQUESTS = 40


def sampling(draw: np.random.Generator, index: int, longest: int) -> SamplingParams:
    """Of many kinds, as people ask for them."""
    fields = {"max_tokens": int(draw.integers(1, longest)), "seed": index}
    if index % 3:
        fields |= {"temperature": 0.8, "top_p": 0.95} if index % 2 else {"temperature": 1.0, "top_k": 20, "min_p": 0.05}
    else:
        fields |= {"temperature": 0.0}
    if index % 5 == 0:
        fields |= {"logprobs": 5, "prompt_logprobs": 2}
    if index % 7 == 0:
        fields |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "stop_token_ids": (9,), "min_tokens": 3}
    return SamplingParams(**fields)


def main() -> None:
    """See the module."""
    flags = vars(parser().parse_args(sys.argv[1:]))
    names = {name: flags[name] for name in EngineArgs.__struct_fields__ if name in flags}
    config = EngineArgs(**names | {"load_format": "dummy"}).config("cuda")
    draw, longest = np.random.default_rng(3), config.model.max_model_len
    with compile_only("sm_90") as compiled:
        runner = MetaRunner(config, "sm_90")
        runner.load()
        runner.initialize_kv_cache(200)
        # There is no adapter to load here: every other step is launched as if a request of it had one.
        runner._lora.is_used = lambda plan: plan.step_id % 2 == 0
        core = EngineCore(config, executor_of(config, runner), 200, 1, groups=runner.kv_layout().groups)
        sent = 0
        while sent < REQUESTS or core.has_work:
            if sent < REQUESTS and draw.random() < 0.4:
                prompt = draw.integers(0, 200, int(draw.integers(1, longest // 2))).tolist()
                core.handle(AddRequest(sent, str(sent), prompt, sampling(draw, sent, longest // 4), 0.0))
                sent += 1
            core.step()
        core.close()
    fresh = [kernel.name for kernel in compiled if not kernel.cached]
    print(json.dumps({"launched": [kernel.name for kernel in compiled], "compiled": fresh}))


if __name__ == "__main__":
    main()
