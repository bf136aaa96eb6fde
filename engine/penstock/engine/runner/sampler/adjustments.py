"""What requests ask to be changed in the logits before anything is chosen, in a fixed order: allowed tokens, bad words,
min_tokens, logit_bias, processors of one's own, then the penalties. A grammar's mask comes before all of them.

The host knows who asks, and says so in one copy a stage. Tokens and positions are read on the device, which has those of the
last step before the host does.
"""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32, Int64
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.sampler.allowed_token_ids import AllowedTokenIds
from penstock.engine.runner.sampler.bad_words import BadWords
from penstock.engine.runner.sampler.custom import GuardedProcessor
from penstock.engine.runner.sampler.logit_bias import LogitBias
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.min_tokens import MinTokens
from penstock.engine.runner.sampler.penalties import Penalties
from penstock.engine.runner.sampler.stage import LogitsStage, Tokens
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.ops import SamplingOps

NOTHING_LEFT = (
    "no token is left to sample: the grammar, allowed_token_ids, bad_words, min_tokens and logits processors together exclude all"
)


class Adjustments:
    """The stages and their state by request row.

    Args:
        runtime: The device.
        ops: What runs there.
        max_num_seqs: Request rows.
        vocab_size: Logits of a row.
        tokens: Of all requests.
        processors: Of one's own; those that leave the likeliest token the likeliest wait for `apply_invariant`.
    """

    def __init__(
        self,
        runtime: Copies,
        ops: SamplingOps,
        max_num_seqs: int,
        vocab_size: int,
        tokens: Tokens,
        processors: Sequence[GuardedProcessor] = (),
    ) -> None:
        self._processors, self._tokens = processors, tokens
        self._invariant = [processor for processor in processors if processor.argmax_invariant]
        self._stages: tuple[LogitsStage, ...] = (
            AllowedTokenIds(runtime, max_num_seqs, vocab_size),
            BadWords(runtime, max_num_seqs, vocab_size),
            MinTokens(runtime, max_num_seqs, vocab_size),
            LogitBias(runtime, max_num_seqs, vocab_size),
            *(processor for processor in processors if not processor.argmax_invariant),
            Penalties(runtime, ops, max_num_seqs),
        )
        self._asked_invariant = np.zeros(max_num_seqs, np.bool_)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        """Takes in a row's new request, and says whether it asks for anything; arguments as in `LogitsStage.admit`."""
        # Every stage hears of it, so that none keeps what the row's last request asked for.
        asked = [stage.admit(row, token_ids, num_prompt_tokens, params) for stage in self._stages]
        invariant = [stage.admit(row, token_ids, num_prompt_tokens, params) for stage in self._invariant]
        self._asked_invariant[row] = any(invariant) and not params.greedy
        return any(asked) or bool(self._asked_invariant[row])

    def apply(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor) -> None:
        """Changes rows `at`, [k], of logits [m, vocab], float32 and contiguous, in place; masked entries become -inf.

        Args:
            logits: [m, vocab].
            at: [k].
            rows: What those k stand for.
            positions: [m], int32, on the device: of the token that each row chooses.
        """
        self._pass(self._stages, logits, at, rows, positions)

    def invariant(self, rows: LogitsRows) -> Bool:
        """[k]: which rows `apply_invariant` is for."""
        return self._asked_invariant[rows.request_rows]

    def apply_invariant(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor) -> None:
        """The same after temperature and min-p, of rows that are not greedy."""
        self._pass(self._invariant, logits, at, rows, positions)

    def failures(self, rows: LogitsRows) -> dict[int, str]:
        """Index into the rows → what went wrong in a processor."""
        broken = {row: message for processor in self._processors for row, message in processor.failures.items()}
        return {index: broken[row] for index, row in enumerate(rows.request_rows.tolist()) if row in broken}

    def _pass(
        self, stages: Sequence[LogitsStage], logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor
    ) -> None:
        for stage in stages:
            wanting = np.flatnonzero(stage.wants(rows))
            if len(wanting):
                stage.apply(logits, at[wanting], rows.take(wanting), positions, self._tokens)
