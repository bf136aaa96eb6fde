"""Egress: what a step produced for all requests, as the one columnar frame that goes to the frontend."""

import msgspec
import numpy as np

from penstock.engine.core import plan
from penstock.engine.core.plan import NONE, Bool, Int32, Int64, SampledLogprobs
from penstock.engine.core.row_table import ranks
from penstock.engine.messages import Finished, Lifecycle, Logprobs, Pooled, PromptLogprobs, Started, StepOutputs


class RequestOutputs(msgspec.Struct, frozen=True):
    """New tokens of some requests, and whatever began or ended."""

    indexes: Int64
    """[m]: the requests."""
    offsets: Int32
    """[m + 1]: where in `token_ids` the tokens of each begin, and where the last end."""
    token_ids: Int32
    """[offsets[m]]."""
    started: list[Started]
    finished: list[Finished]
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    lifecycle: Lifecycle | None = None
    pooled: Pooled | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (len(self.indexes) or self.started or self.finished or self.prompt_logprobs or self.lifecycle)

    def frame(self, engine_index: int, step_id: int, now: float) -> StepOutputs:
        """The message; `now` is Unix time in seconds."""
        return StepOutputs(
            engine_index=engine_index,
            step_id=step_id,
            time=now,
            indexes=self.indexes.astype("<i8").tobytes(),
            offsets=self.offsets.astype("<i4").tobytes(),
            token_ids=self.token_ids.astype("<i4").tobytes(),
            started=self.started,
            finished=self.finished,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            lifecycle=self.lifecycle,
            pooled=self.pooled,
        )


class Tokens(msgspec.Struct, frozen=True):
    """The tokens of a step that are sent."""

    indexes: Int64
    """[m]: requests."""
    offsets: Int32
    """[m + 1], as `RequestOutputs` has them."""
    token_ids: Int32
    """[offsets[m]]."""
    counts: Int32
    """[r]: output tokens of each of the plan's rows. Requests that have gone have none."""


def offsets_of(counts: Int32, several: bool) -> Int32:
    """[m + 1]: where as many things of each begin, and where the last end; `several`: whether any has more than one."""
    offsets = np.arange(len(counts) + 1, dtype=np.int32)
    if several:
        np.cumsum(counts, out=offsets[1:])
    return offsets


def no_tokens() -> Tokens:
    """Return the tokens of outputs without any."""
    return Tokens(np.empty(0, np.int64), offsets_of(NONE, False), NONE, NONE)


def logprob_columns(logprobs: SampledLogprobs | None, counts: Int32) -> Logprobs | None:
    """The logprobs of tokens that are sent.

    Args:
        logprobs: Of the plan's rows that asked for them.
        counts: [r], for each of the plan's rows how many of its tokens are sent; the frame has the tokens in this order.
    """
    if logprobs is None:
        return None
    rows, which = logprobs.plan_rows, ranks(logprobs.plan_rows)
    sent = which < counts[rows]
    if not sent.any():
        return None
    begins = np.cumsum(counts) - counts
    return Logprobs(
        positions=(begins[rows] + which)[sent].astype("<i4").tobytes(),
        sampled=logprobs.sampled[sent].astype("<f4").tobytes(),
        ranks=logprobs.ranks[sent].astype("<i4").tobytes(),
        width=logprobs.top_ids.shape[1],
        top_ids=logprobs.top_ids[sent].astype("<i4").tobytes(),
        top_logprobs=logprobs.top_logprobs[sent].astype("<f4").tobytes(),
    )


def prompt_logprob_columns(
    logprobs: plan.PromptLogprobs | None, live: Bool, indexes: Int64, rows: Int32
) -> PromptLogprobs | None:
    """The logprobs of prompt tokens that are sent.

    Args:
        logprobs: Of the plan's rows that asked for them.
        live: [r], for each of the plan's rows whether its request is still there.
        indexes: [rows]: each row's request.
        rows: [r]: the plan's.
    """
    if logprobs is None:
        return None
    sent = live[logprobs.plan_rows]
    if not sent.any():
        return None
    return PromptLogprobs(
        indexes=indexes[rows[logprobs.plan_rows[sent]]].astype("<i8").tobytes(),
        positions=logprobs.positions[sent].astype("<i4").tobytes(),
        token_ids=logprobs.token_ids[sent].astype("<i4").tobytes(),
        logprobs=logprobs.logprobs[sent].astype("<f4").tobytes(),
        ranks=logprobs.ranks[sent].astype("<i4").tobytes(),
        width=logprobs.top_ids.shape[1],
        top_ids=logprobs.top_ids[sent].astype("<i4").tobytes(),
        top_logprobs=logprobs.top_logprobs[sent].astype("<f4").tobytes(),
    )


def pooled_columns(pooled: plan.Pooled | None, live: Bool, indexes: Int64, rows: Int32) -> Pooled | None:
    """The embeddings that are sent.

    Args:
        pooled: Of the plan's rows whose prompts have ended.
        live: [r], for each of the plan's rows whether its request is still there.
        indexes: [rows]: each row's request.
        rows: [r]: the plan's.
    """
    if pooled is None:
        return None
    sent = live[pooled.plan_rows]
    if not sent.any():
        return None
    return Pooled(
        indexes=indexes[rows[pooled.plan_rows[sent]]].astype("<i8").tobytes(),
        size=pooled.vectors.shape[1],
        vectors=pooled.vectors[sent].astype("<f4").tobytes(),
    )
