"""One request over HTTP, whatever happens around it: the same tokens, and nothing left behind."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from frontend_process import Server, make_llama, serving

from penstock.api import events
from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored
from penstock.engine import LLM, SamplingParams
from testing.replays import replayed

PROMPT = [70 + at * 7 % 200 for at in range(100)]
PARAMS: dict[str, Any] = {"seed": 9, "max_tokens": 60, "ignore_eos": True}
# 28 blocks of 16 tokens: a little more than two such requests. A prompt takes four steps.
FLAGS = ["--num-gpu-blocks-override", "28", "--max-model-len", "256", "--max-num-batched-tokens", "32"]


@pytest.fixture(scope="module")
def llama(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(llama, tmp_path_factory.mktemp("log") / "log", *FLAGS) as running:
        yield running


def in_cache(server: Server, start: int) -> set[bytes]:
    """The cached blocks that the event stream tells from an event on; from one that is yet to come: a picture of the cache."""
    blocks: set[bytes] = set()
    for payload in replayed(server.replay_port, start):
        for event in events.decode(payload).events:
            match event:
                case BlockStored(hashes):
                    blocks |= set(hashes)
                case BlockRemoved(hashes):
                    blocks -= set(hashes)
                case AllBlocksCleared():
                    blocks = set()
    return blocks


async def ask(client: aiohttp.ClientSession, **fields: Any) -> tuple[str, int]:
    """The answer, and how much of the prompt was cached."""
    body = {"model": "tiny", "prompt": PROMPT, **PARAMS, **fields}
    async with client.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def leave(client: aiohttp.ClientSession, neighbour: int) -> None:
    """A stream whose client goes after the first tokens."""
    body = {"model": "tiny", "prompt": PROMPT[neighbour:], **PARAMS, "stream": True}
    async with client.post("/v1/completions", json=body) as response:
        await response.content.readline()


async def figure(client: aiohttp.ClientSession, name: str) -> float:
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    [value] = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")]
    return value


@pytest.mark.req("EG-12", "KV-31", "PRE-08", "PC-23", "PC-24")
async def test_a_requests_tokens_depend_on_nobody_else(llama: Path, server: Server) -> None:
    with LLM(str(llama), in_process=True, kv_cache_memory_bytes=4 * 2**20) as llm:  # whole in one step, with room for all
        [expected] = llm.generate([PROMPT], SamplingParams(**PARAMS), progress=False)
    text = expected.outputs[0].text
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as client:
        assert await ask(client) == (text, 0), "alone, in chunks"
        cached = await ask(client)
        assert cached[0] == text and cached[1] > 0, "from the cache"

        others = [ask(client, prompt=PROMPT[at + 1 :], seed=at) for at in range(8)]
        answers = await asyncio.gather(*(ask(client, cache_salt=str(at)) for at in range(3)), *others)
        assert [answer for answer, _ in answers[:3]] == [text] * 3, "in a crowd"
        assert await figure(client, "penstock_num_preemptions_total") > 0, "which was too large for the cache"

        gone = [leave(client, at + 1) for at in range(6)]
        answer, *_ = await asyncio.gather(ask(client, cache_salt="fresh"), *gone)
        assert answer[0] == text, "among clients that leave"

        async with asyncio.timeout(60):
            while True:
                async with client.get("/load") as response:
                    report = await response.json()
                if report["num_requests_running"] == 0 and not report["num_requests_waiting"]:
                    break
                await asyncio.sleep(0.05)
        assert report["kv_blocks_reclaimable"] == report["kv_blocks_total"], "no block is in use"
    live = in_cache(server, 10**9)
    assert live and in_cache(server, 0) == live, "and the events have told of every block"
