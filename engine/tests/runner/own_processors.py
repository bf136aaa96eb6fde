"""Logits processors as people write them, for test_logits_processors."""

import torch


class Favour:
    """Adds `vllm_xargs.favour` = [token, bias, after how many output tokens]; breaks where `vllm_xargs.break` says so."""

    argmax_invariant = False

    def __init__(self, max_num_seqs, vocab_size):
        self.asked = [None] * max_num_seqs
        self.calls, self.dtypes = [], set()

    def admit(self, row, token_ids, num_prompt_tokens, params):
        if params.extra_args.get("break") == "admit":
            raise KeyError("no such thing")
        self.asked[row] = params.extra_args
        return "favour" in params.extra_args

    def apply(self, logits, rows):
        self.calls.append(len(logits))
        self.dtypes.add(logits.dtype)
        for place, (row, outputs) in enumerate(zip(rows.request_rows, rows.num_output_tokens, strict=True)):
            token, bias, after = self.asked[row]["favour"]
            broken = self.asked[row].get("break")
            if broken == "raise":
                raise RuntimeError("out of luck")
            if broken == "nan":
                logits[place, 3] = float("nan")
            if outputs >= after:
                logits[place, token] += bias
        return logits[:, 1:] if "shape" in [self.asked[row].get("break") for row in rows.request_rows] else logits


class Sharpen:
    """Doubles all logits: the likeliest stays the likeliest."""

    argmax_invariant = True

    def __init__(self, max_num_seqs, vocab_size):
        self.calls = []

    def admit(self, row, token_ids, num_prompt_tokens, params):
        return "sharpen" in params.extra_args

    def apply(self, logits, rows):
        self.calls.append(rows.request_rows.tolist())
        return logits * torch.full((len(rows.request_rows), 1), 2.0)


class Insist:
    """Makes the token `vllm_xargs.insist` the likeliest by far, masked or not."""

    argmax_invariant = False

    def __init__(self, max_num_seqs, vocab_size):
        self.tokens = [None] * max_num_seqs

    def admit(self, row, token_ids, num_prompt_tokens, params):
        self.tokens[row] = params.extra_args.get("insist")
        return self.tokens[row] is not None

    def apply(self, logits, rows):
        for place, row in enumerate(rows.request_rows.tolist()):
            logits[place, self.tokens[row]] = 999.0
        return logits


class Unfinished:
    """Has no apply."""

    argmax_invariant = False

    def __init__(self, max_num_seqs, vocab_size): ...

    def admit(self, row, token_ids, num_prompt_tokens, params): ...


class Unmade(Sharpen):
    def __init__(self, max_num_seqs, vocab_size):
        raise OSError("its file is missing")
