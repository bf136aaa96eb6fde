"""Logprobs of a step that are on their way to the host."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.core.plan import Int32, PromptLogprobs, SampledLogprobs
from penstock.engine.runner.device.runtime import DeviceRuntime
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.prompt_logprobs import PromptRows, PromptScores
from penstock.engine.runner.sampler.sampler import not_finite_message
from penstock.kernels.sampling.buffers import SamplingBuffers
from penstock.kernels.sampling.ops import SamplingOps
from penstock.kernels.sampling.reference import RowLogprobs


class Download(NamedTuple):
    """Logprobs of k rows, and where they go."""

    found: RowLogprobs
    """On the device."""
    pinned: RowLogprobs
    """To be read when the step's transfer is over."""

    @staticmethod
    def of(runtime: DeviceRuntime, found: RowLogprobs) -> "Download":
        """Finds room on the host."""
        return Download(found, RowLogprobs(*(runtime.pinned(*column.shape, dtype=column.dtype) for column in found)))

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(source, target) of each copy."""
        return [pair for pair in zip(self.found, self.pinned, strict=True) if pair[0].numel()]


class SampledScores(NamedTuple):
    """Of the tokens that a step samples."""

    plan_rows: Int32
    """[k]: indexes into the plan's rows."""
    download: Download

    def read(self) -> SampledLogprobs:
        """Once the transfer is over."""
        sampled, ranks, top_ids, top, _ = (column.numpy().copy() for column in self.download.pinned)
        return SampledLogprobs(plan_rows=self.plan_rows, sampled=sampled, ranks=ranks, top_ids=top_ids, top_logprobs=top)


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


def pairs(scores: SampledScores | None, prompts: PromptParts | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What of a step's scores must be copied to the host: (source, target)."""
    downloads = [*([] if scores is None else [scores.download]), *([] if prompts is None else prompts.downloads)]
    return [pair for download in downloads for pair in download.pairs]


def score_prompts(
    runtime: DeviceRuntime,
    ops: SamplingOps,
    buffers: SamplingBuffers,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    rows: PromptRows,
    normalised: bool,
) -> PromptParts:
    """Scores prompt tokens; the host does not wait. As many rows of logits are in memory at a time as `buffers` has.

    Args:
        runtime: The device.
        ops: What runs there.
        buffers: Work is done in.
        compute_logits: The LM head, [x, hidden] → [x, vocab].
        hidden: [n, hidden]: of the step's tokens.
        rows: What to score; not empty.
        normalised: Whether to give log probabilities, not logits.
    """
    width, most = int(rows.counts.max()), len(buffers.wide)
    counts, indices = rows.counts.astype(np.int32), rows.hidden_indices.astype(np.int64)
    at, token_ids, asked = upload(runtime, indices, rows.token_ids, counts)
    downloads, vocab_size = [], 0
    for start in range(0, len(counts), most):
        part = slice(start, start + most)
        logits = compute_logits(hidden.index_select(0, at[part]))
        vocab_size = logits.shape[1]
        found = ops.logprobs(logits, token_ids[part], asked[part], min(width, vocab_size), normalised, buffers, False)
        downloads.append(Download.of(runtime, found))
    return PromptParts(rows, downloads, vocab_size)
