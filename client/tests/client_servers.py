"""Servers to measure and to talk to."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

TINY = Path(__file__).parents[2] / "examples/models/penstock-tiny"
START_S = 120.0


class Script:
    """An OpenAI server that answers as a test says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[Script, web.Request, dict[str, Any]], Awaitable[web.StreamResponse]] = stream_words
        self.metrics: str | None = None
        self.scrapes = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return await self.answer(self, request, body)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "one"}, {"id": "two"}]})

    async def gauges(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)


def event(body: dict[str, Any], text: str, reason: str | None = None) -> bytes:
    """One chunk, for a chat or a completion."""
    content: dict[str, Any] = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return b"data: " + json.dumps({"choices": [{"index": 0, **content, "finish_reason": reason}]}).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": 2}}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


async def begin(request: web.Request) -> web.StreamResponse:
    """The head of a stream."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


async def stream_words(_: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As many one-word tokens as were asked for."""
    count = body.get("max_tokens") or body.get("max_completion_tokens") or 3
    prompt = len(body["prompt"]) if "prompt" in body else len(body["messages"])
    response = await begin(request)
    for number in range(count):
        await response.write(event(body, f"w{number} ", "length" if number == count - 1 else None))
    await response.write(usage(prompt, count) + b"data: [DONE]\n\n")
    return response


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Returns when a server takes requests."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"the server did not become ready:\n{log.read_text()}")
