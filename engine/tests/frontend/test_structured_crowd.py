"""A crowd over HTTP with drafts: free text, grammars and forced calls in the same steps, and clients that leave."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from frontend_process import Server, serving

MODEL = Path(__file__).parents[3] / "examples/models/penstock-tiny"
TURNS = "the mill turns, the wheel turns, "
PATTERN = r"(the (mill|wheel) turns, ){4}"
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "flow": {"enum": [1, 20, None]}},
    "required": ["name", "flow"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "turn", "parameters": SCHEMA}}
# 96 blocks of 16 tokens: room for about ten of the requests.
FLAGS = ("--num-gpu-blocks-override", "96", "--max-model-len", "512", "--spec-method", "ngram", "--spec-tokens", "4")


@pytest.fixture(scope="module", params=["", "--async-scheduling"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (*FLAGS, *filter(None, [request.param]))
    with serving(MODEL, tmp_path_factory.mktemp("log") / "serve.log", *flags) as running:
        yield running


def body_of(kind: str, seed: int) -> tuple[str, dict[str, Any]]:
    """The path and the body of a streamed request."""
    body: dict[str, Any] = {"model": "tiny", "seed": seed, "temperature": 0.7, "max_tokens": 300, "stream": True}
    if kind in ("free", "regex"):
        body["prompt"] = TURNS * 3
        if kind == "free":
            return "/v1/completions", body | {"max_tokens": 60, "ignore_eos": True}
        return "/v1/completions", body | {"structured_outputs": {"regex": PATTERN}}
    body["messages"] = [{"role": "user", "content": TURNS * 2}]
    if kind == "call":
        return "/v1/chat/completions", body | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    form = {"type": "json_schema", "json_schema": {"name": "mill", "schema": SCHEMA, "strict": True}}
    return "/v1/chat/completions", body | {"response_format": form}


async def ask(client: aiohttp.ClientSession, kind: str, seed: int, leaves: int = 0) -> None:
    """Reads an answer and checks it, or leaves after some events of it."""
    path, body = body_of(kind, seed)
    text, arguments, reason, events = "", "", None, 0
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            events += 1
            if events == leaves:
                response.close()
                return
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            choice = event["choices"][0]
            delta = choice.get("delta", {})
            text += choice.get("text") or delta.get("content") or ""
            arguments += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            reason = choice["finish_reason"] or reason
    if kind == "free":
        assert reason == "length" and text
    elif kind == "regex":
        assert reason == "stop" and re.fullmatch(PATTERN, text), text
    else:
        assert reason == ("tool_calls" if kind == "call" else "stop"), (reason, text, arguments)
        assert kind != "call" or not text
        found = json.loads(arguments if kind == "call" else text)
        assert set(found) == {"name", "flow"} and found["flow"] in (1, 20, None) and len(found["name"]) <= 8


async def figure(client: aiohttp.ClientSession, name: str) -> float:
    """The sum of a metric's samples."""
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


@pytest.mark.slow
async def test_answers_are_valid_and_nothing_is_left_behind(server: Server) -> None:
    dice = random.Random(5)
    timeout = aiohttp.ClientTimeout(total=200)
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
        asks = [
            ask(client, kind, seed, leaves=dice.randint(1, 12) if seed % 3 == 0 else 0)
            for seed in range(15)
            for kind in ("free", "regex", "schema", "call")
        ]
        dice.shuffle(asks)
        await asyncio.gather(*asks)
        async with asyncio.timeout(60):
            while True:
                async with client.get("/load") as response:
                    report = await response.json()
                if report["num_requests_running"] == 0 and not report["num_requests_waiting"]:
                    break
                await asyncio.sleep(0.05)
        assert report["kv_blocks_reclaimable"] == report["kv_blocks_total"], "no block is in use"
        assert await figure(client, "penstock_spec_decode_num_accepted_tokens_total") > 0
        assert await figure(client, "penstock_num_preemptions_total") > 0
