"""Logprobs of a step, of the tokens that it samples and of prompts, on their way to the host."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.config import LogprobsMode
from penstock.engine.core.plan import Bool, Int32, Int64, PromptLogprobs, SampledLogprobs
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.kernels.sampling.reference import RowLogprobs

_AT_ONCE = 256
"""Rows of logits of prompts that are in memory at a time at most."""


class Download(NamedTuple):
    """Logprobs of k rows, and where they go."""

    found: RowLogprobs
    """On the device."""
    pinned: RowLogprobs
    """To be read when the step's transfer is over."""

    @staticmethod
    def of(runtime: Copies, found: RowLogprobs) -> "Download":
        """Finds room on the host, where they are not there already."""
        if runtime.shares_memory:
            return Download(found, found)
        return Download(found, RowLogprobs(*(runtime.pinned(*column.shape, dtype=column.dtype) for column in found)))

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(source, target) of each copy."""
        pairs = zip(self.found, self.pinned, strict=True)
        return [] if self.pinned is self.found else [pair for pair in pairs if pair[0].numel()]


class SampledScores(NamedTuple):
    """Of the tokens that a step samples."""

    plan_rows: Int32
    """[k]: indexes into the plan's rows."""
    at: Int64
    """[k]: indexes into the step's rows of logits."""
    download: Download

    def read(self, kept: Bool | None = None) -> SampledLogprobs:
        """Once the transfer is over.

        Args:
            kept: [m]: of the rows of logits those whose tokens count; None: all.
        """
        which = slice(None) if kept is None else kept[self.at]
        sampled, ranks, top_ids, top, _ = (column.numpy()[which].copy() for column in self.download.pinned)
        plan_rows = self.plan_rows[which]
        return SampledLogprobs(plan_rows=plan_rows, sampled=sampled, ranks=ranks, top_ids=top_ids, top_logprobs=top)


class PromptScores(NamedTuple):
    """What came of the prompt tokens that a step scores."""

    logprobs: PromptLogprobs | None = None
    not_finite: dict[int, str] = {}  # noqa: RUF012 (never changed)
    """Index into the plan's rows → what is wrong with that request's logits."""


class PromptParts(NamedTuple):
    """Of the prompt tokens that a step scores, a part at a time."""

    rows: PromptRows
    downloads: list[Download]
    vocab_size: int

    def read(self) -> PromptScores:
        """Once the transfer is over."""
        columns = (np.concatenate(parts) for parts in zip(*(part.pinned for part in self.downloads), strict=True))
        logprobs, ranks, top_ids, top, bad = columns
        broken = {
            int(self.rows.plan_rows[at]): not_finite_message(int(bad[at, 0]), int(bad[at, 1]), self.vocab_size)
            for at in np.flatnonzero(bad.any(1)).tolist()
        }
        found = PromptLogprobs(
            plan_rows=self.rows.plan_rows,
            positions=self.rows.positions,
            token_ids=self.rows.token_ids,
            logprobs=logprobs,
            ranks=ranks,
            top_ids=top_ids,
            top_logprobs=top,
        )
        return PromptScores(found, broken)


def not_finite_message(nans: int, infinities: int, number: int) -> str:
    """What a request is told whose logits, so many, are not all finite."""
    return f"the model's logits are not finite ({nans} NaN and {infinities} infinite of {number})"


def pairs(scores: SampledScores | None, prompts: PromptParts | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What of a step's scores must be copied to the host: (source, target)."""
    downloads = [*([] if scores is None else [scores.download]), *([] if prompts is None else prompts.downloads)]
    return [pair for download in downloads for pair in download.pairs]


def score_prompts(
    runtime: Copies,
    sampler: Sampler,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    rows: PromptRows,
    mode: LogprobsMode,
) -> PromptParts:
    """Scores prompt tokens; the host does not wait. No more rows of logits are in memory at a time than the sampler has room for:
    a long prompt's all together would be many times the size of a step.

    Args:
        runtime: The device.
        sampler: Of the runner.
        compute_logits: The LM head, [x, hidden] → [x, vocab]; a row's result does not depend on the others.
        hidden: [n, hidden]: of the step's tokens.
        rows: What to score; not empty.
        mode: What logprobs are of; those of prompts are raw in any case.
    """
    ops, buffers = sampler.ops, sampler.buffers
    width, most = int(rows.counts.max()), min(len(buffers.wide), _AT_ONCE)
    counts, indices = rows.counts.astype(np.int32), rows.hidden_indices.astype(np.int64)
    at, token_ids, asked = upload(runtime, indices, rows.token_ids, counts)
    downloads, vocab_size = [], 0
    for start in range(0, len(counts), most):
        part = slice(start, start + most)
        logits = compute_logits(hidden.index_select(0, at[part]))
        vocab_size = logits.shape[1]
        normalised = mode.endswith("logprobs")
        found = ops.logprobs(logits, token_ids[part], asked[part], min(width, vocab_size), normalised, buffers, False)
        downloads.append(Download.of(runtime, found))
    return PromptParts(rows, downloads, vocab_size)
