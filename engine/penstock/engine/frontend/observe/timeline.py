"""The timeline of a request: the events of its life as the core stamped them, and the intervals between them."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import orjson
from aiohttp import web

from penstock.api.headers import TIMELINE
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.generation import Choice, Generation
from penstock.engine.messages import Lifecycle, LifecycleEvent


class Intervals(NamedTuple):
    """Seconds; the three add up to the time between queueing and the last token. A preemption lengthens the one it falls into."""

    queue: float
    """Seconds until it was first scheduled."""
    prefill: float
    """Seconds from there to the first token."""
    decode: float
    """Seconds from there to the last token."""


def turns(lifecycle: Lifecycle) -> Iterator[tuple[int, LifecycleEvent, float]]:
    """Request, event and Unix time of every turn in a frame."""
    indexes: list[int] = np.frombuffer(lifecycle.indexes, dtype="<i8").tolist()
    times: list[float] = np.frombuffer(lifecycle.times, dtype="<f8").tolist()
    return zip(indexes, map(LifecycleEvent, lifecycle.events), times, strict=True)


def intervals(choice: Choice) -> Intervals | None:
    """Return the intervals of a sequence that has tokens, or an embedding, which counts as the first and the last one. None
    before."""
    queued, scheduled = _first(choice, LifecycleEvent.QUEUED), _first(choice, LifecycleEvent.SCHEDULED)
    if queued is None or scheduled is None or not (choice.num_tokens or choice.pooled is not None):
        return None
    return Intervals(scheduled - queued, choice.first_time - scheduled, choice.last_time - choice.first_time)


def wants_timeline(request: web.Request) -> bool:
    """Whether the client asked to be told; `ApiError` 400 for a header that says neither."""
    given = request.headers.get(TIMELINE, "false").lower()
    if given not in ("true", "false"):
        raise ApiError(400, f"{TIMELINE} must be true or false", param=TIMELINE)
    return given == "true"


def with_timeline(body: bytes, generation: Generation) -> bytes:
    """An answer's JSON object with its `timeline` at the end."""
    return body[:-1] + b',"timeline":' + orjson.dumps(timeline(generation)) + b"}"


def timeline_event(generation: Generation) -> bytes:
    """The event that tells it in a stream; without choices, as the event of `usage` is."""
    event = {"object": "penstock.timeline", "choices": [], "timeline": timeline(generation)}
    return b"data: " + orjson.dumps(event) + b"\n\n"


def timeline(generation: Generation) -> list[dict[str, Any]]:
    """Return the timeline of each choice, for a client that asked for it: each event with its Unix time and the milliseconds
    since the
    request arrived, and the runs of tokens that single steps gave, as accepted drafts make them."""
    return [
        {
            "index": choice.number,
            "data_parallel_rank": generation.rank,
            "prompt_tokens": choice.prompt_tokens,
            "cached_tokens": choice.cached_tokens,
            "completion_tokens": choice.num_tokens,
            "finish_reason": choice.finish_reason,
            "events": [
                {"event": event, "time": round(time, 6), "ms": round(1000 * (time - generation.arrival), 3)}
                for event, time in [("arrived", generation.arrival), *_events(choice)]
            ],
            "runs": [
                {"first": first, "tokens": tokens, "ms": round(1000 * (time - generation.arrival), 3)}
                for first, tokens, time in _runs(choice)
            ],
        }
        for choice in generation.choices
    ]


def _events(choice: Choice) -> Iterable[tuple[str, float]]:
    """Return the events in the order of time. A request can be preempted several times."""
    found = [(event.name.lower(), time) for event, time in choice.turns]
    if choice.num_tokens:
        found += [("first_token", choice.first_time), ("last_token", choice.last_time)]
    return sorted(found, key=lambda turn: turn[1])


def _runs(choice: Choice) -> Iterable[tuple[int, int, float]]:
    """The runs as the client has them: a stop cuts inside one."""
    return ((first, min(tokens, choice.num_tokens - first), time) for first, tokens, time in choice.runs)


def _first(choice: Choice, event: LifecycleEvent) -> float | None:
    return next((time for turn, time in choice.turns if turn is event), None)
