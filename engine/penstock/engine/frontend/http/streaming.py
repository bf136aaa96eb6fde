"""Server-sent events: a generation's text as it comes.

The pass over the core's frame writes to each stream's connection itself (`EventStream.push`): a token costs no task a turn. The
handler sleeps until the end, or until the client has fallen behind, for whom it waits.
"""

import logging

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from penstock.engine.frontend.errors import ApiError, internal_error
from penstock.engine.frontend.generation import Generation
from penstock.engine.frontend.http.exchange import is_gone
from penstock.engine.frontend.observe.timeline import timeline_event, wants_timeline
from penstock.engine.frontend.openai.encoding import Format

log = logging.getLogger(__name__)

_SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


async def stream(request: web.Request, generation: Generation, answer: Format) -> web.StreamResponse:
    """Sends events as they come. What goes wrong before the first token is a status, later an event."""
    await generation.changed()
    response = web.StreamResponse(headers=_SSE)
    writer = await response.prepare(request)
    assert writer is not None, "only an answer that has ended has none"
    events = EventStream(request, response, generation, answer)
    try:
        if not generation.finished:
            await writer.write(events.take())  # the headers with it
            generation.follow(events.push)
        while not generation.finished:
            await generation.changed()
            await _caught_up(writer, events, generation)
        rest = [events.take(), timeline_event(generation) if wants_timeline(request) else b"", answer.last(generation.usage)]
    except ApiError as error:
        rest = [_failed(response, answer, error)]
    except Exception as error:  # too late for a status
        if isinstance(error, ConnectionError) and is_gone(request):
            raise
        log.exception("a stream failed: %s %s", request.method, request.path)
        rest = [_failed(response, answer, internal_error())]
    await response.write_eof(b"".join(rest))
    return response


def _failed(response: web.StreamResponse, answer: Format, error: ApiError) -> bytes:
    """The last event of a stream that cannot go on."""
    response.force_close()
    return answer.failed(error)


async def _caught_up(writer: AbstractStreamWriter, events: "EventStream", generation: Generation) -> None:
    """Waits for a client that reads too slowly, and sends what has gathered meanwhile; nothing where that can go with the end."""
    while not generation.finished and not events.push():
        await writer.drain()


class EventStream:
    """One answer on its connection, headers already sent.

    Args:
        request: Of the client.
        response: The answer, prepared.
        generation: What it tells.
        answer: How.
    """

    __slots__ = ("_answer", "_choices", "_chunked", "_protocol", "_unopened")

    def __init__(self, request: web.Request, response: web.StreamResponse, generation: Generation, answer: Format) -> None:
        self._protocol = request.protocol
        self._chunked = hdrs.TRANSFER_ENCODING in response.headers  # HTTP/1.0 has no chunks
        self._choices = generation.choices
        self._answer = answer
        self._unopened = list(generation.choices)

    def take(self) -> bytes:
        """The events for everything that is new."""
        if not self._unopened and len(self._choices) == 1:  # as of nearly every token
            delta = self._choices[0].take()
            return b"" if delta is None else self._answer.chunk(self._choices[0], delta)
        events: list[bytes] = []
        if self._unopened:
            events += [self._answer.first(choice) for choice in self._unopened if choice.num_tokens]
            self._unopened = [choice for choice in self._unopened if not choice.num_tokens]
        for choice in self._choices:
            if (delta := choice.take()) is not None:
                events.append(self._answer.chunk(choice, delta))
        return b"".join(events)

    def push(self) -> bool:
        """Sends them; False where the client has to read first.

        To a connection that is gone nothing is sent: its handler is about to be cancelled.
        """
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            return True
        if self._protocol.writing_paused:
            return False
        if data := self.take():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return True
