"""A step's tokens on a device, with all that requests may ask for beside a token: changes of the logits, and logprobs.

What a step's rows ask for is known to the host. Where it is a token alone, the sampler's launches are all, which a graph may
hold; else more launches come before and after them, and the host still does not wait.
"""

from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.config import LogprobsMode
from penstock.engine.core.plan import Int32, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.device.adjustments import DeviceAdjustments
from penstock.engine.runner.device.runtime import DeviceRuntime
from penstock.engine.runner.device.sampler import DeviceSampler
from penstock.engine.runner.device.scores import Download, SampledScores
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.params import NO_LOGPROBS
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.buffers import Column
from penstock.kernels.sampling.ops import SamplingOps
from penstock.kernels.sampling.params import columns
from penstock.kernels.sampling.reference import processed


class Choice(NamedTuple):
    """Of the m rows of a step's logits."""

    result: torch.Tensor
    """[m, RESULT], int32, on the device."""
    scores: SampledScores | None = None
    failed: dict[int, str] = {}  # noqa: RUF012 (never changed)
    """Index into the plan's rows → why that request's token counts for nothing, as far as the host knows."""


class DeviceChoice:
    """See the module.

    Args:
        runtime: The device.
        ops: What runs there.
        sampler: The last part.
        adjustments: What comes before it.
        max_num_seqs: Request rows.
        mode: What logprobs are of.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        ops: SamplingOps,
        sampler: DeviceSampler,
        adjustments: DeviceAdjustments,
        max_num_seqs: int,
        mode: LogprobsMode,
    ) -> None:
        self._runtime, self._ops, self._sampler, self._adjustments, self._mode = runtime, ops, sampler, adjustments, mode
        self._logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        """[rows]: alternatives for each token of the prompt; NO_LOGPROBS where none are asked for."""

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Takes in what a row's new request asks for; arguments as in `LogitsStage.admit`."""
        self._sampler.admit(row, params)
        self._adjustments.admit(row, token_ids, num_prompt_tokens, params)
        self._logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.prompt_logprobs[row] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs

    def plain(self, plan: StepPlan) -> bool:
        """Whether a token is all that the rows of a plan ask for: then `choose` comes to `sampler.sample` with their path."""
        rows = plan.rows[plan.samples]
        return not (self._adjustments.asked(rows) or (self._logprobs[rows] != NO_LOGPROBS).any())

    def choose(
        self, plan: StepPlan, rows: RowTable, logits: torch.Tensor, request_rows: torch.Tensor, positions: torch.Tensor
    ) -> Choice:
        """Chooses the step's tokens.

        Args:
            plan: The step's; a row of logits for each of its rows, and for padding after them.
            rows: To which it has been applied.
            logits: [m, vocab], as the model gave them. Not changed.
            request_rows: [m], int32, on the device.
            positions: [m], int32, on the device: of the tokens that are chosen.
        """
        path = self._sampler.path(plan.rows[plan.samples])
        if self.plain(plan):
            return Choice(self._sampler.sample(logits, request_rows, positions, path))
        at = np.flatnonzero(plan.samples)
        of = plan.rows[at]
        asking = LogitsRows(of, rows.num_computed[of], rows.num_prompt_tokens[of], rows.token_ids)
        adjusted, params = logits, self._sampler.params
        if self._adjustments.asked(of):
            nans, infinities = logits.isnan().sum(-1), logits.isinf().sum(-1)
            # Tokens of broken rows count for nothing; zeros keep them from breaking what looks at several rows.
            adjusted = torch.where((nans + infinities > 0)[:, None], 0.0, logits.float())
            self._adjustments.change(adjusted, at, asking)
            params = self._change_invariant(adjusted, at, asking)
            result = self._sampler.sample(adjusted, request_rows, positions, path, masked=True, params=params)
            # The model's logits are judged, not those with masks.
            result[:, Column.NANS], result[:, Column.INFINITIES] = nans, infinities
        else:
            result = self._sampler.sample(logits, request_rows, positions, path)
        scores = self._scores(logits, adjusted, params, result, at, of)
        failed = {int(at[index]): message for index, message in self._adjustments.failures(asking).items()}
        return Choice(result, scores, failed)

    def _change_invariant(self, adjusted: torch.Tensor, at: np.ndarray, asking: LogitsRows) -> torch.Tensor:
        """Lets processors see what temperature and min-p leave. Returns parameters with which these happen once."""
        wanting = np.flatnonzero(self._adjustments.invariant(asking))
        if not len(wanting):
            return self._sampler.params
        index, of = upload(self._runtime, at[wanting], asking.request_rows[wanting].astype(np.int64))
        params = self._sampler.params.clone()
        row = columns(self._sampler.params.index_select(0, of))
        scaled = adjusted.index_select(0, index) / row.temperature[:, None]
        floor = scaled.amax(-1) + row.log_min_p
        adjusted.index_copy_(0, index, scaled.masked_fill(scaled < floor[:, None], float("-inf")))
        self._adjustments.change_invariant(adjusted, at[wanting], asking.take(wanting))
        columns(params).temperature.index_fill_(0, of, 1.0)
        columns(params).log_min_p.index_fill_(0, of, float("-inf"))
        return params

    def _scores(
        self, logits: torch.Tensor, adjusted: torch.Tensor, params: torch.Tensor, result: torch.Tensor, at: np.ndarray, of: Int32
    ) -> SampledScores | None:
        counts = self._logprobs[of]
        asked = np.flatnonzero(counts != NO_LOGPROBS)
        if not len(asked):
            return None
        at, counts, buffers = at[asked], counts[asked].astype(np.int32), self._sampler.buffers
        index, wanted, request_rows = upload(self._runtime, at, counts, of[asked])
        masked = self._mode.startswith("processed")
        if masked:
            limit, last = buffers.threshold.index_select(0, index), buffers.last_id.index_select(0, index)
            values = processed(adjusted.index_select(0, index), request_rows, params, limit, last)
        else:
            values = logits.index_select(0, index)
        tokens = result[:, Column.TOKEN].index_select(0, index)
        width, normalised = min(int(counts.max()), logits.shape[1]), self._mode.endswith("logprobs")
        found = self._ops.logprobs(values, tokens, wanted, width, normalised, buffers, masked)
        return SampledScores(at.astype(np.int32), Download.of(self._runtime, found))
