"""One question through the gateway, and who answered it and why."""

import json
import sys
import time
from collections.abc import AsyncIterator
from urllib.parse import unquote

import httpx
from rich.console import Console

from penstock.api import headers
from penstock.operator.local.runtime import LocalError, LocalRuntime

MAX_TOKENS = 128


async def ask(runtime: LocalRuntime, question: str, out: Console) -> None:
    """Streams the answer to standard output and says on `out` which replica gave it and why it was chosen.

    Raises:
        LocalError: the gateway answered with an error.
    """
    body = {
        "model": runtime.models[0].model.served_names[0],
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    out.print(f"[dim]you[/dim]    {question}", highlight=False)
    began = time.monotonic()
    async with (
        httpx.AsyncClient(timeout=60.0) as client,
        client.stream(
            "POST", f"{runtime.endpoints.url}/v1/chat/completions", json=body, headers={headers.DECISION: "explain"}
        ) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise LocalError(f"the gateway answered {answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
        first, tokens = 0.0, 0
        async for chunk in _chunks(answer):
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                if text and not first:
                    first = time.monotonic()
                sys.stdout.write(text)
                sys.stdout.flush()
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
        sys.stdout.write("\n")
        sys.stdout.flush()
    ended = time.monotonic()
    uid = answer.headers.get(headers.REPLICA, "")
    out.print(f"\n[dim]replica[/dim]  {_name(runtime, uid)}", highlight=False)
    out.print(f"[dim]because[/dim]  {unquote(answer.headers.get(headers.DECISION, 'the gateway did not say'))}", highlight=False)
    speed = f"{tokens} tokens, the first after {1000 * (first - began):.0f} ms, {tokens / max(ended - began, 1e-9):.0f} tokens/s"
    out.print(f"[dim]took[/dim]     {speed}", highlight=False)


async def _chunks(answer: httpx.Response) -> AsyncIterator[dict]:
    """The JSON objects of a server-sent event stream; raises `LocalError` on an error event."""
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise LocalError(f"the stream ended with an error: {chunk['error']['message']}")
            yield chunk


def _name(runtime: LocalRuntime, uid: str) -> str:
    names = {pod.uid: f"{pod.name} ({pod.address})" for deployment in runtime.deployments.values() for pod in deployment.pods}
    return names.get(uid, f"unknown replica {uid!r}")
