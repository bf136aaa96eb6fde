"""A step's frame, cut into one for each frontend that has requests in it."""

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine.messages import FRONTEND_SHIFT, Lifecycle, Logprobs, Pooled, PromptLogprobs, StepOutputs

_Bool = npt.NDArray[np.bool_]


def split(frame: StepOutputs) -> Iterator[tuple[int, StepOutputs]]:
    """Yield (frontend, its part) for every frontend that the frame concerns. A frame for a single one is passed on unchanged."""
    owners = _owners(frame.indexes)
    concerned = set(np.unique(owners).tolist())
    concerned.update(one.index >> FRONTEND_SHIFT for one in (*frame.started, *frame.finished))
    for columns in (frame.lifecycle, frame.prompt_logprobs, frame.pooled):
        if columns is not None:
            concerned.update(np.unique(_owners(columns.indexes)).tolist())
    if len(concerned) == 1:
        yield concerned.pop(), frame
        return
    for frontend in sorted(concerned):
        yield frontend, _part(frame, frontend, owners == frontend)


def _part(frame: StepOutputs, frontend: int, mine: _Bool) -> StepOutputs:
    """The requests of one frontend; `mine` [r] says which of the rows with tokens are."""
    lengths = np.diff(np.frombuffer(frame.offsets, "<i4"))
    tokens = np.repeat(mine, lengths)
    return msgspec.structs.replace(
        frame,
        indexes=np.frombuffer(frame.indexes, "<i8")[mine].tobytes(),
        offsets=np.concatenate(([0], np.cumsum(lengths[mine]))).astype("<i4").tobytes(),
        token_ids=np.frombuffer(frame.token_ids, "<i4")[tokens].tobytes(),
        started=[one for one in frame.started if one.index >> FRONTEND_SHIFT == frontend],
        finished=[one for one in frame.finished if one.index >> FRONTEND_SHIFT == frontend],
        logprobs=_logprobs(frame.logprobs, tokens),
        prompt_logprobs=_prompt_logprobs(frame.prompt_logprobs, frontend),
        lifecycle=_lifecycle(frame.lifecycle, frontend),
        pooled=_pooled(frame.pooled, frontend),
    )


def _logprobs(columns: Logprobs | None, tokens: _Bool) -> Logprobs | None:
    """Return the log-probabilities of the tokens that stay, by their new positions."""
    if columns is None:
        return None
    positions = np.frombuffer(columns.positions, "<i4")
    kept = tokens[positions]
    if not kept.any():
        return None
    moved = np.cumsum(tokens) - 1
    return Logprobs(
        positions=moved[positions[kept]].astype("<i4").tobytes(),
        sampled=_kept(columns.sampled, 4, kept),
        ranks=_kept(columns.ranks, 4, kept),
        width=columns.width,
        top_ids=_kept(columns.top_ids, 4 * columns.width, kept),
        top_logprobs=_kept(columns.top_logprobs, 4 * columns.width, kept),
    )


def _prompt_logprobs(columns: PromptLogprobs | None, frontend: int) -> PromptLogprobs | None:
    if columns is None:
        return None
    kept = _owners(columns.indexes) == frontend
    if not kept.any():
        return None
    return PromptLogprobs(
        indexes=_kept(columns.indexes, 8, kept),
        positions=_kept(columns.positions, 4, kept),
        token_ids=_kept(columns.token_ids, 4, kept),
        logprobs=_kept(columns.logprobs, 4, kept),
        ranks=_kept(columns.ranks, 4, kept),
        width=columns.width,
        top_ids=_kept(columns.top_ids, 4 * columns.width, kept),
        top_logprobs=_kept(columns.top_logprobs, 4 * columns.width, kept),
    )


def _lifecycle(columns: Lifecycle | None, frontend: int) -> Lifecycle | None:
    if columns is None:
        return None
    kept = _owners(columns.indexes) == frontend
    if not kept.any():
        return None
    return Lifecycle(_kept(columns.indexes, 8, kept), _kept(columns.events, 1, kept), _kept(columns.times, 8, kept))


def _pooled(columns: Pooled | None, frontend: int) -> Pooled | None:
    if columns is None:
        return None
    kept = _owners(columns.indexes) == frontend
    if not kept.any():
        return None
    return Pooled(_kept(columns.indexes, 8, kept), columns.size, _kept(columns.vectors, 4 * columns.size, kept))


def _owners(indexes: bytes) -> npt.NDArray[np.int64]:
    """The frontend of each request in a column of indexes."""
    return np.frombuffer(indexes, "<i8") >> FRONTEND_SHIFT


def _kept(column: bytes, width: int, kept: _Bool) -> bytes:
    """The rows of `width` bytes that stay."""
    return np.frombuffer(column, np.uint8).reshape(len(kept), width)[kept].tobytes()
