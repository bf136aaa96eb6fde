"""What requests ask to be changed in the logits before anything is chosen, in a fixed order: allowed tokens, bad words,
min_tokens, logit_bias, processors of one's own, repetition penalty, frequency and presence penalties."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.engine.core.plan import Int32
from penstock.engine.runner.sampler.allowed_token_ids import AllowedTokenIds
from penstock.engine.runner.sampler.bad_words import BadWords
from penstock.engine.runner.sampler.custom import GuardedProcessor
from penstock.engine.runner.sampler.logit_bias import LogitBias
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.min_tokens import MinTokens
from penstock.engine.runner.sampler.output_penalties import OutputPenalties
from penstock.engine.runner.sampler.repetition_penalty import RepetitionPenalty
from penstock.engine.runner.sampler.stage import MASKED, LogitsStage
from penstock.engine.sampling import SamplingParams

NOTHING_LEFT = "no token is left to sample: allowed_token_ids, bad_words, min_tokens and logits processors together exclude all"


class Adjustments:
    """The stages and their state by request row; a step none of whose rows asks for any pays one look.

    Args:
        max_num_seqs: Request rows.
        vocab_size: Logits of a row.
        processors: Of one's own; those that leave the likeliest token the likeliest wait for `apply_invariant`.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, processors: Sequence[GuardedProcessor] = ()) -> None:
        self._processors = processors
        self._invariant = [processor for processor in processors if processor.argmax_invariant]
        self._stages: tuple[LogitsStage, ...] = (
            AllowedTokenIds(max_num_seqs, vocab_size),
            BadWords(max_num_seqs, vocab_size),
            MinTokens(max_num_seqs, vocab_size),
            LogitBias(max_num_seqs, vocab_size),
            *(processor for processor in processors if not processor.argmax_invariant),
            RepetitionPenalty(max_num_seqs),
            OutputPenalties(max_num_seqs, vocab_size),
        )
        self._asked: set[int] = set()

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Takes in a row's new request; arguments as in `LogitsStage.admit`."""
        # Every stage hears of it, so that none keeps what the row's last request asked for.
        asked = [stage.admit(row, token_ids, num_prompt_tokens, params) for stage in self._stages]
        if any(asked):
            self._asked.add(row)
        else:
            self._asked.discard(row)
        for processor in self._invariant:
            processor.admit(row, token_ids, num_prompt_tokens, params)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """The adjusted logits.

        Args:
            logits: [m, vocab], float32 and finite. Not changed.
            rows: What they stand for.

        Returns:
            [m, vocab], masked entries -inf; `logits` itself where no row asks for anything.
        """
        if not self._any_asked(rows):
            return logits
        adjusted = logits.clone()
        for stage in self._stages:
            _apply(stage, adjusted, rows)
        return adjusted

    def apply_invariant(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Changes what is left to sample from, [k, vocab], after temperature; `rows` are those k, none of which is greedy."""
        for processor in self._invariant:
            _apply(processor, logits, rows)

    def failures(self, rows: LogitsRows) -> dict[int, str]:
        """Index into the rows → what went wrong in a processor."""
        if not any(processor.failures for processor in self._processors):
            return {}
        broken = {row: message for processor in self._processors for row, message in processor.failures.items()}
        return {index: broken[row] for index, row in enumerate(rows.request_rows.tolist()) if row in broken}

    def observe(self, rows: LogitsRows, token_ids: Int32) -> None:
        """Takes in the chosen tokens, [m]."""
        if self._any_asked(rows):
            for stage in self._stages:
                stage.observe(rows, token_ids)

    def _any_asked(self, rows: LogitsRows) -> bool:
        return bool(self._asked) and not self._asked.isdisjoint(rows.request_rows.tolist())


def _apply(stage: LogitsStage, logits: torch.Tensor, rows: LogitsRows) -> None:
    at = np.flatnonzero(stage.wants(rows))
    if len(at):
        stage.apply(logits, torch.from_numpy(at), rows.take(at))


def describe_nothing_left(adjusted: torch.Tensor) -> dict[int, str]:
    """Row → what is wrong, for the rows of [m, vocab] in which every token is masked."""
    rows = (adjusted.amax(-1) == MASKED).nonzero().squeeze(-1).tolist()
    return dict.fromkeys(rows, NOTHING_LEFT)
