"""What requests ask to be changed in the logits before anything is chosen, in a fixed order: allowed tokens, bad words,
min_tokens, logit_bias, repetition penalty, frequency and presence penalties."""

import numpy as np
import torch

from penstock.engine.core.plan import Int32
from penstock.engine.runner.sampler.allowed_token_ids import AllowedTokenIds
from penstock.engine.runner.sampler.bad_words import BadWords
from penstock.engine.runner.sampler.logit_bias import LogitBias
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.min_tokens import MinTokens
from penstock.engine.runner.sampler.output_penalties import OutputPenalties
from penstock.engine.runner.sampler.repetition_penalty import RepetitionPenalty
from penstock.engine.runner.sampler.stage import MASKED, LogitsStage
from penstock.engine.sampling import SamplingParams


class Adjustments:
    """The stages and their state by request row; a step none of whose rows asks for any pays one look.

    Args:
        max_num_seqs: Request rows.
        vocab_size: Logits of a row.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._stages: tuple[LogitsStage, ...] = (
            AllowedTokenIds(max_num_seqs, vocab_size),
            BadWords(max_num_seqs, vocab_size),
            MinTokens(max_num_seqs, vocab_size),
            LogitBias(max_num_seqs, vocab_size),
            RepetitionPenalty(max_num_seqs),
            OutputPenalties(max_num_seqs, vocab_size),
        )
        self._asked = np.zeros(max_num_seqs, np.bool_)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Takes in a row's new request; arguments as in `LogitsStage.admit`."""
        # Every stage hears of it, so that none keeps what the row's last request asked for.
        asked = [stage.admit(row, token_ids, num_prompt_tokens, params) for stage in self._stages]
        self._asked[row] = any(asked)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """The adjusted logits.

        Args:
            logits: [m, vocab], float32 and finite. Not changed.
            rows: What they stand for.

        Returns:
            [m, vocab], masked entries -inf; `logits` itself where no row asks for anything.
        """
        if not self._asked[rows.request_rows].any():
            return logits
        adjusted = logits.clone()
        for stage in self._stages:
            at = np.flatnonzero(stage.wants(rows))
            if len(at):
                stage.apply(adjusted, torch.from_numpy(at), rows.take(at))
        return adjusted

    def observe(self, rows: LogitsRows, token_ids: Int32) -> None:
        """Takes in the chosen tokens, [m]."""
        if self._asked[rows.request_rows].any():
            for stage in self._stages:
                stage.observe(rows, token_ids)


def describe_nothing_left(adjusted: torch.Tensor) -> dict[int, str]:
    """Row → what is wrong, for the rows of [m, vocab] in which every token is masked."""
    rows = (adjusted.amax(-1) == MASKED).nonzero().squeeze(-1).tolist()
    message = "no token is left to sample: allowed_token_ids, bad_words and min_tokens together exclude all"
    return dict.fromkeys(rows, message)
