"""Egress: what a step produced for all requests, as the one columnar frame that goes to the frontend."""

import msgspec
import numpy as np

from penstock.engine.core import plan
from penstock.engine.core.plan import Bool, Int32, Int64, SampledLogprobs, empty
from penstock.engine.messages import Finished, Lifecycle, Logprobs, Pooled, PromptLogprobs, Started, StepOutputs


class RequestOutputs(msgspec.Struct, frozen=True):
    """One token each for some requests, and whatever began or ended."""

    indexes: Int64
    """[m]: the requests."""
    token_ids: Int32
    """[m]."""
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
        count = len(self.indexes)
        return StepOutputs(
            engine_index=engine_index,
            step_id=step_id,
            time=now,
            indexes=self.indexes.astype("<i8").tobytes(),
            offsets=np.arange(count + 1, dtype="<i4").tobytes(),
            token_ids=self.token_ids.astype("<i4").tobytes(),
            started=self.started,
            finished=self.finished,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            lifecycle=self.lifecycle,
            pooled=self.pooled,
        )


def no_tokens() -> tuple[Int64, Int32]:
    """The token columns of outputs without tokens."""
    return np.empty(0, np.int64), empty()


def logprob_columns(logprobs: SampledLogprobs | None, accepted: Bool) -> Logprobs | None:
    """The logprobs of tokens that are sent.

    Args:
        logprobs: Of the plan's rows that asked for them.
        accepted: [r], for each of the plan's rows whether its token is sent; the frame has the tokens in this order.
    """
    if logprobs is None:
        return None
    sent = accepted[logprobs.plan_rows]
    if not sent.any():
        return None
    positions = np.cumsum(accepted) - 1
    return Logprobs(
        positions=positions[logprobs.plan_rows[sent]].astype("<i4").tobytes(),
        sampled=logprobs.sampled[sent].astype("<f4").tobytes(),
        ranks=logprobs.ranks[sent].astype("<i4").tobytes(),
        width=logprobs.top_ids.shape[1],
        top_ids=logprobs.top_ids[sent].astype("<i4").tobytes(),
        top_logprobs=logprobs.top_logprobs[sent].astype("<f4").tobytes(),
    )


def prompt_logprob_columns(logprobs: plan.PromptLogprobs | None, live: Bool, indexes: Int64) -> PromptLogprobs | None:
    """The logprobs of prompt tokens that are sent.

    Args:
        logprobs: Of the plan's rows that asked for them.
        live: [r], for each of the plan's rows whether its request is still there.
        indexes: [r]: the requests.
    """
    if logprobs is None:
        return None
    sent = live[logprobs.plan_rows]
    if not sent.any():
        return None
    return PromptLogprobs(
        indexes=indexes[logprobs.plan_rows[sent]].astype("<i8").tobytes(),
        positions=logprobs.positions[sent].astype("<i4").tobytes(),
        token_ids=logprobs.token_ids[sent].astype("<i4").tobytes(),
        logprobs=logprobs.logprobs[sent].astype("<f4").tobytes(),
        ranks=logprobs.ranks[sent].astype("<i4").tobytes(),
        width=logprobs.top_ids.shape[1],
        top_ids=logprobs.top_ids[sent].astype("<i4").tobytes(),
        top_logprobs=logprobs.top_logprobs[sent].astype("<f4").tobytes(),
    )


def pooled_columns(pooled: plan.Pooled | None, live: Bool, indexes: Int64) -> Pooled | None:
    """The embeddings that are sent.

    Args:
        pooled: Of the plan's rows whose prompts have ended.
        live: [r], for each of the plan's rows whether its request is still there.
        indexes: [r]: the requests.
    """
    if pooled is None:
        return None
    sent = live[pooled.plan_rows]
    if not sent.any():
        return None
    return Pooled(
        indexes=indexes[pooled.plan_rows[sent]].astype("<i8").tobytes(),
        size=pooled.vectors.shape[1],
        vectors=pooled.vectors[sent].astype("<f4").tobytes(),
    )
