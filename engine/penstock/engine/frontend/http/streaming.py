"""Server-sent events: a generation's text as it comes."""

from aiohttp import web

from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.generation import Generation
from penstock.engine.frontend.observe.timeline import timeline_event, wants_timeline
from penstock.engine.frontend.openai.encoding import Format

_SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


async def stream(request: web.Request, generation: Generation, answer: Format) -> web.StreamResponse:
    """Sends events as they come. What goes wrong before the first token is a status, later an event."""
    await generation.changed()
    response = web.StreamResponse(headers=_SSE)
    await response.prepare(request)
    opened: set[int] = set()
    try:
        while True:
            if data := _events(generation, answer, opened):
                await response.write(data)
            if generation.finished:
                break
            await generation.changed()
        if wants_timeline(request):
            await response.write(timeline_event(generation))
        await response.write(answer.last(generation.usage))
    except ApiError as error:
        response.force_close()
        await response.write(answer.failed(error))
    await response.write_eof()
    return response


def _events(generation: Generation, answer: Format, opened: set[int]) -> bytes:
    """The events for everything that is new; adds to `opened` the choices that get their first."""
    events: list[bytes] = []
    for choice in generation.choices:
        if choice.num_tokens and choice.number not in opened:
            opened.add(choice.number)
            events.append(answer.first(choice))
        if (delta := choice.take()) is not None:
            events.append(answer.chunk(choice, delta))
    return b"".join(events)
