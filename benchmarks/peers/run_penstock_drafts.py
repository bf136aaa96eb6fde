"""Penstock with drafts, in this process. Usage: run_penstock_drafts MODEL none|ngram|draft_model K [DRAFT]"""

import sys
from pathlib import Path

import torch
from drafting.side import Side, answer

from peers.drafts_loop import Answers, serve


def main() -> None:
    """Serves the commands."""
    torch.set_num_threads(1)
    model, method, drafts, *draft = sys.argv[1:]
    speculative = {"method": method, "num_speculative_tokens": int(drafts)} | ({"model": draft[0]} if draft else {})
    side = Side(Path(model), None if method == "none" else speculative)

    def answers(prompts: Answers, streams: int, output: int) -> Answers:
        answer([side], prompts, streams, [output] * len(prompts), 0.0)
        return [side.answers[at] for at in range(len(prompts))]

    serve(answers)


if __name__ == "__main__":
    main()
