"""Sends one request and stamps what comes back. One small object a request, no work that can wait until its end."""

import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec

from penstock.client.bench.datasets import Request
from penstock.client.bench.records import Record, Recorder
from penstock.client.server import Server, ServerError, check, unreachable
from penstock.client.stream import DONE, EventDecoder, decode_chunk, error_message

CHAT: Final = "/chat/completions"
_JSON: Final = {"content-type": "application/json"}
_encode = msgspec.json.Encoder().encode


class Sender:
    """Requests of one kind.

    Args:
        server: Where to.
        endpoint: `/v1/completions`, or one that ends in `/chat/completions`.
        model: The name to ask for.
        fields: More of the body, such as `temperature`.
    """

    def __init__(self, server: Server, endpoint: str, model: str, fields: Mapping[str, Any]) -> None:
        self._server = server
        self._url = server.url(endpoint)
        self._chat = endpoint.endswith(CHAT)
        options = {"include_usage": True} | fields.get("stream_options", {})
        self._fields = {"model": model, "stream": True, **fields, "stream_options": options}

    def body(self, request: Request) -> bytes:
        """The request as JSON."""
        if self._chat:
            content: Any = request.prompt
            if request.images:
                images = [{"type": "image_url", "image_url": {"url": url}} for url in request.images]
                content = [*images, {"type": "text", "text": request.prompt}]
            messages = [{"role": "user", "content": content}]
            return _encode({**self._fields, "messages": messages, "max_completion_tokens": request.output_len})
        return _encode({**self._fields, "prompt": request.prompt, "max_tokens": request.output_len})

    async def send(self, due: float, request: Request) -> Record:
        """One request from beginning to end; stamps are those of `time.perf_counter`. Errors are in the record."""
        body = self.body(request)
        recorder = Recorder(time.perf_counter(), due)
        try:
            return await self._stream(body, recorder)
        except ServerError as error:
            return recorder.fail(error.kind, str(error))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            failure = unreachable(self._server.base_url, error)
            return recorder.fail(failure.kind, str(failure))

    async def _stream(self, body: bytes, recorder: Recorder) -> Record:
        decoder = EventDecoder()
        async with await self._server.post(self._url, body, _JSON) as response:
            await check(response)
            async for data in response.content.iter_any():
                stamp = time.perf_counter()
                for payload in decoder.feed(data):
                    if payload == DONE:
                        continue
                    try:
                        chunk = decode_chunk(payload)
                    except msgspec.MsgspecError as error:
                        return recorder.fail("protocol", f"no chunk of a completion: {error}: {payload[:200]!r}")
                    if chunk.error is not None:
                        return recorder.fail("error in the stream", error_message(chunk.error))
                    recorder.add(stamp, chunk)
        return recorder.complete()
