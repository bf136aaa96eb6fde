"""A step's tokens, with all that requests may ask for beside a token: masks, changes of the logits, and logprobs.

What a step's rows ask for is known to the host. Where it is a token alone, the sampler's launches are all, which a graph may
hold; else more launches come before and after them, and the host still does not wait.
"""

from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.config import LogprobsMode
from penstock.engine.core.plan import Int32, Int64, SampleInputs, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.prompt_logprobs import NO_LOGPROBS, PromptRows, prompt_rows
from penstock.engine.runner.sampler.adjustments import Adjustments
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.sampler import PATHS, Sampler, path_of
from penstock.engine.runner.sampler.scores import Download, SampledScores
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.buffers import Column, Path
from penstock.kernels.sampling.params import columns
from penstock.kernels.sampling.rejection import settle

_GUIDED = len(PATHS)
"""Of a row that asks for a token, perhaps under a mask."""
_PARTICULAR = _GUIDED + 1
"""Of a row that asks for more than a token."""


class Choosing(NamedTuple):
    """The k rows of logits whose tokens count."""

    at: Int64
    """[k]: which of the m rows of logits."""
    plan_rows: Int32
    """[k]: indexes into the plan's rows."""
    rows: LogitsRows
    """What they stand for."""

    def take(self, which: Int64) -> "Choosing":
        """Those at some indexes."""
        return Choosing(self.at[which], self.plan_rows[which], self.rows.take(which))


class Drawn(NamedTuple):
    """The d drafts among a step's choices that were drawn; others are compared with what is chosen in their place."""

    at: Int64
    """[d]: which of the m rows of logits judges each."""
    ids: Int32
    """[d]."""
    left: torch.Tensor
    """[d, vocab]: what they were drawn from, as of `rejection.draw_drafts`."""


class Choice(NamedTuple):
    """Of the m rows of a step's logits."""

    result: torch.Tensor
    """[m, RESULT], int32, on the device."""
    scores: SampledScores | None = None
    failed: dict[int, str] = {}  # noqa: RUF012 (never changed)
    """Index into the plan's rows → why that request's token counts for nothing, as far as the host knows."""


class Chooser:
    """See the module.

    Args:
        runtime: The device.
        sampler: The last part.
        adjustments: What comes before it.
        max_num_seqs: Request rows.
        mode: What logprobs are of.
    """

    def __init__(
        self, runtime: Copies, sampler: Sampler, adjustments: Adjustments, max_num_seqs: int, mode: LogprobsMode
    ) -> None:
        self._runtime, self._sampler, self._adjustments, self._mode = runtime, sampler, adjustments, mode
        self._adjusted = np.zeros(max_num_seqs, np.bool_)
        self._logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self._ways = np.zeros(max_num_seqs, np.int8)
        self._prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self._scored: set[int] = set()
        """Rows whose last request asked for logprobs of its prompt."""

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams, guided: bool = False) -> None:
        """Takes in what a row's new request asks for; arguments as in `LogitsStage.admit`, and whether masks may come."""
        self._sampler.admit(row, params)
        self._adjusted[row] = self._adjustments.admit(row, token_ids, num_prompt_tokens, params)
        self._logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        particular = self._adjusted[row] or params.logprobs is not None
        self._ways[row] = _PARTICULAR if particular else _GUIDED if guided else path_of(params)
        self._prompt_logprobs[row] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        (self._scored.discard if params.prompt_logprobs is None else self._scored.add)(row)

    def prompt_rows(self, plan: StepPlan, rows: RowTable) -> PromptRows | None:
        """The prompt tokens whose logprobs a step gives, as of `prompt_logprobs.prompt_rows`."""
        return prompt_rows(plan, rows, self._prompt_logprobs) if self._scored else None

    def plain(self, request_rows: Int32) -> Path | None:
        """Where a token is all that rows [k] ask for, their path: then `choose` comes to `sampler.sample`. Else None."""
        way = self._way(request_rows)
        return None if way >= _GUIDED else PATHS[way]

    def _way(self, request_rows: Int32) -> int:
        return int(self._ways[request_rows].max(initial=Path.GREEDY))

    def choose(
        self,
        choosing: Choosing,
        logits: torch.Tensor,
        request_rows: torch.Tensor,
        positions: torch.Tensor,
        inputs: SampleInputs,
        drawn: Drawn | None = None,
    ) -> Choice:
        """Chooses the step's tokens.

        Args:
            choosing: The rows of logits that count; others are of requests that do not sample, or padding.
            logits: [m, vocab], as the model gave them. Not changed.
            request_rows: [m], int32, on the device.
            positions: [m], int32, on the device: of the tokens that are chosen.
            inputs: With the masks of the step.
            drawn: Drafts, of which those that are accepted are chosen; None: none was drawn.

        Raises:
            ValueError: There are not as many masks as choices under a mask.
        """
        of = choosing.rows.request_rows
        way, masked = self._way(of), _masked(choosing, inputs)
        path = PATHS[way] if way < _GUIDED else self._sampler.path(of)
        adjusted, params = logits, self._sampler.params
        masks = None if masked is None else self._upload_masks(choosing.at[masked], inputs.bitmask)
        alone = masks is None or self._masks_alone(of, drawn)
        if way != _PARTICULAR and alone:
            result = self._sampler.sample(logits, request_rows, positions, path, masks=masks)
            self._settle(result, logits, params, drawn, request_rows, positions)
            return Choice(result)
        if self._adjusted[of].any() or not alone:
            adjusted, bad = self._sampler.ops.clean(logits)
            if masks is not None:
                self._sampler.ops.mask(adjusted, *masks)
            self._adjustments.apply(adjusted, choosing.at, choosing.rows, positions)
            params = self._change_invariant(adjusted, choosing, positions)
            result = self._sampler.sample(adjusted, request_rows, positions, path, masked=True, params=params)
            # The model's logits are judged, not those with masks.
            result[:, Column.NANS : Column.INFINITIES + 1] = bad
        else:
            result = self._sampler.sample(logits, request_rows, positions, path, masks=masks)
        self._settle(result, adjusted, params, drawn, request_rows, positions)
        scores = self._scores(logits, adjusted, params, result, choosing)
        failures = self._adjustments.failures(choosing.rows)
        return Choice(result, scores, {int(choosing.plan_rows[index]): message for index, message in failures.items()})

    def _upload_masks(self, at: Int64, bitmask: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        rows, bits = upload(self._runtime, at, bitmask)
        return rows, bits

    def _masks_alone(self, request_rows: Int32, drawn: Drawn | None) -> bool:
        """Whether the sampler can apply the masks itself: it does, and nothing else looks at logits under them."""
        judged = drawn is not None or (self._mode.startswith("processed") and (self._logprobs[request_rows] != NO_LOGPROBS).any())
        return self._sampler.ops.takes_masks and not judged

    def _settle(
        self,
        result: torch.Tensor,
        adjusted: torch.Tensor,
        params: torch.Tensor,
        drawn: Drawn | None,
        request_rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Chooses anew in the place of drafts that were drawn, by what the sampler has just left of the logits."""
        if drawn is None:
            return
        at, ids = upload(self._runtime, drawn.at, drawn.ids.astype(np.int64))
        rows = request_rows.index_select(0, at)
        left = self._sampler.ops.processed(adjusted, at, rows, params, self._sampler.buffers)
        seeds = columns(params.index_select(0, rows)).seed
        result[at, Column.TOKEN] = settle(left, drawn.left, ids, seeds, positions.index_select(0, at).long()).int()

    def _change_invariant(self, adjusted: torch.Tensor, choosing: Choosing, positions: torch.Tensor) -> torch.Tensor:
        """Lets processors see what temperature and min-p leave. Returns parameters with which these happen once."""
        wanting = choosing.take(np.flatnonzero(self._adjustments.invariant(choosing.rows)))
        if not len(wanting.at):
            return self._sampler.params
        index, of = upload(self._runtime, wanting.at, wanting.rows.request_rows.astype(np.int64))
        params = self._sampler.params.clone()
        row = columns(self._sampler.params.index_select(0, of))
        scaled = adjusted.index_select(0, index) / row.temperature[:, None]
        floor = scaled.amax(-1) + row.log_min_p
        adjusted.index_copy_(0, index, scaled.masked_fill(scaled < floor[:, None], float("-inf")))
        self._adjustments.apply_invariant(adjusted, wanting.at, wanting.rows, positions)
        columns(params).temperature.index_fill_(0, of, 1.0)
        columns(params).log_min_p.index_fill_(0, of, float("-inf"))
        return params

    def _scores(
        self, logits: torch.Tensor, adjusted: torch.Tensor, params: torch.Tensor, result: torch.Tensor, choosing: Choosing
    ) -> SampledScores | None:
        counts = self._logprobs[choosing.rows.request_rows]
        asked = np.flatnonzero(counts != NO_LOGPROBS)
        if not len(asked):
            return None
        counts, asking = counts[asked].astype(np.int32), choosing.take(asked)
        ops, buffers = self._sampler.ops, self._sampler.buffers
        index, wanted, request_rows = upload(self._runtime, asking.at, counts, asking.rows.request_rows)
        masked = self._mode.startswith("processed")
        values = ops.processed(adjusted, index, request_rows, params, buffers) if masked else logits.index_select(0, index)
        tokens = result[:, Column.TOKEN].index_select(0, index)
        width, normalised = min(int(counts.max()), logits.shape[1]), self._mode.endswith("logprobs")
        found = ops.logprobs(values, tokens, wanted, width, normalised, buffers, masked)
        return SampledScores(asking.plan_rows, asking.at, Download.of(self._runtime, found))


def _masked(choosing: Choosing, inputs: SampleInputs) -> Int64 | slice | None:
    """Which of the choices are those of `inputs.bitmask`, in its order: [l], or all of them; None: there are no masks."""
    if not len(inputs.masked_rows):
        return None
    if len(inputs.bitmask) == len(choosing.plan_rows) and inputs.masked_rows.tobytes() == choosing.plan_rows.tobytes():
        return slice(None)
    has_mask = np.zeros(1 + max(choosing.plan_rows.max(initial=0), inputs.masked_rows.max()), np.bool_)
    has_mask[inputs.masked_rows] = True
    masked = has_mask[choosing.plan_rows].nonzero()[0]
    if len(masked) != len(inputs.bitmask):
        raise ValueError(f"{len(inputs.bitmask)} masks came for {len(masked)} choices")
    return masked
