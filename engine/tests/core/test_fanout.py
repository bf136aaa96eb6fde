"""A frame cut by frontends says the same as the whole."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.ipc.fanout import split
from penstock.engine.messages import (
    FRONTEND_SHIFT,
    Finished,
    FinishReason,
    Lifecycle,
    Logprobs,
    Pooled,
    PromptLogprobs,
    Started,
    StepOutputs,
)

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # frontend
        st.lists(st.integers(0, 999), max_size=3),  # tokens
        st.booleans(),  # with logprobs
        st.booleans(),  # started
        st.booleans(),  # finished
        st.integers(0, 2),  # prompt logprobs
        st.integers(0, 2),  # lifecycle events
    ),
    min_size=1,
    max_size=12,
)


def column(values: list[Any], dtype: str) -> bytes:
    return np.array(values, dtype).tobytes()


def frame_of(requests: list[tuple[int, list[int], bool, bool, bool, int, int]], width: int) -> StepOutputs:
    """Every value in it tells its request and place."""
    ids = [(frontend << FRONTEND_SHIFT) + at for at, (frontend, *_) in enumerate(requests)]
    tokens = [one[1] for one in requests]
    scored = [at for at, one in enumerate(one for one in requests for _ in one[1]) if one[2]]
    prompts = [index for index, one in zip(ids, requests, strict=True) for _ in range(one[5])]
    turns = [index for index, one in zip(ids, requests, strict=True) for _ in range(one[6])]
    places = list(range(len(prompts)))
    return StepOutputs(
        engine_index=0,
        step_id=7,
        time=1.5,
        indexes=column(ids, "<i8"),
        offsets=column(np.cumsum([0, *map(len, tokens)]).tolist(), "<i4"),
        token_ids=column([token for some in tokens for token in some], "<i4"),
        started=[Started(index, 3) for index, one in zip(ids, requests, strict=True) if one[3]],
        finished=[Finished(index, FinishReason.STOP) for index, one in zip(ids, requests, strict=True) if one[4]],
        logprobs=Logprobs(
            *(column(scored, kind) for kind in ("<i4", "<f4", "<i4")),
            width,
            *(column([at * 10 + k for at in scored for k in range(width)], kind) for kind in ("<i4", "<f4")),
        )
        if scored
        else None,
        prompt_logprobs=PromptLogprobs(
            column(prompts, "<i8"),
            *(column(places, kind) for kind in ("<i4", "<i4", "<f4", "<i4")),
            width,
            *(column([at * 10 + k for at in places for k in range(width)], kind) for kind in ("<i4", "<f4")),
        )
        if prompts
        else None,
        lifecycle=Lifecycle(column(turns, "<i8"), bytes(len(turns)), column(list(range(len(turns))), "<f8")) if turns else None,
    )


def rows(frame: StepOutputs) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
    """By request: tokens with their logprobs, prompt logprobs, lifecycle."""
    offsets = np.frombuffer(frame.offsets, "<i4")
    tokens = np.frombuffer(frame.token_ids, "<i4").tolist()
    assert offsets[-1] == len(tokens)
    scores: dict[int, Any] = {}
    if (columns := frame.logprobs) is not None:
        positions = np.frombuffer(columns.positions, "<i4").tolist()
        top = np.frombuffer(columns.top_ids, "<i4").reshape(len(positions), columns.width).tolist()
        sampled = np.frombuffer(columns.sampled, "<f4").tolist()
        scores = {at: (value, ids) for at, value, ids in zip(positions, sampled, top, strict=True)}
    given_tokens = {
        index: [(tokens[k], scores.get(k)) for k in range(offsets[at], offsets[at + 1])]
        for at, index in enumerate(np.frombuffer(frame.indexes, "<i8").tolist())
    }
    prompts: dict[int, Any] = {}
    if (asked := frame.prompt_logprobs) is not None:
        top = np.frombuffer(asked.top_logprobs, "<f4").reshape(-1, asked.width).tolist() if asked.width else None
        for at, index in enumerate(np.frombuffer(asked.indexes, "<i8").tolist()):
            place = np.frombuffer(asked.positions, "<i4")[at]
            prompts.setdefault(index, []).append((place, top and top[at]))
    turns: dict[int, Any] = {}
    if frame.lifecycle is not None:
        times = np.frombuffer(frame.lifecycle.times, "<f8").tolist()
        for index, time in zip(np.frombuffer(frame.lifecycle.indexes, "<i8").tolist(), times, strict=True):
            turns.setdefault(index, []).append(time)
    return given_tokens, prompts, turns


@given(REQUESTS, st.integers(0, 2))
def test_the_parts_are_disjoint_and_make_the_whole(requests: Any, width: int) -> None:
    frame = frame_of(requests, width)
    parts = dict(split(frame))
    assert set(parts) == {frontend for frontend, *_ in requests}
    whole = rows(frame)
    for frontend, part in parts.items():
        for mine, everything in zip(rows(part), whole, strict=True):
            assert mine == {index: row for index, row in everything.items() if index >> FRONTEND_SHIFT == frontend}
        assert part.started == [one for one in frame.started if one.index >> FRONTEND_SHIFT == frontend]
        assert part.finished == [one for one in frame.finished if one.index >> FRONTEND_SHIFT == frontend]
        assert (part.step_id, part.time) == (7, 1.5)


def test_a_frame_of_one_frontend_is_not_copied() -> None:
    frame = frame_of([(2, [1], False, False, False, 0, 0)] * 3, 0)
    [(frontend, part)] = split(frame)
    assert frontend == 2 and part is frame


def test_embeddings_go_to_whoever_asked() -> None:
    indexes = [1, (1 << FRONTEND_SHIFT) + 1, 2, (2 << FRONTEND_SHIFT) + 9]
    vectors = np.arange(12, dtype="<f4").reshape(4, 3)
    gone = Finished(3 << FRONTEND_SHIFT, FinishReason.ABORT)
    ends = [*(Finished(index, FinishReason.STOP) for index in indexes), gone]
    pooled = Pooled(column(indexes, "<i8"), 3, vectors.tobytes())
    parts = dict(split(StepOutputs(0, 7, 1.5, b"", column([0], "<i4"), b"", [], ends, pooled=pooled)))
    for frontend, of in ((0, [0, 2]), (1, [1]), (2, [3])):
        part = parts[frontend].pooled
        assert part is not None and part.size == 3 and part.vectors == vectors[of].tobytes()
        assert np.frombuffer(part.indexes, "<i8").tolist() == [indexes[at] for at in of]
    assert parts[3].pooled is None
