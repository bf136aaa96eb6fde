"""Hostile images over HTTP, many at a time: each answer is right or a 400 that names the part, and the server stays as it was."""

import asyncio
import os
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from frontend_process import serving
from hostile_images import HOST, Case, base, draw
from PIL import Image
from vision_models import data_url, with_tokenizer

pytestmark = pytest.mark.slow

NUMBER, AT_ONCE = 300, 8


@pytest.fixture(scope="module")
def server(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = with_tokenizer(tmp_path_factory.mktemp("models") / "seeing", tokenizer_files)
    flags = ("--dtype", "float32", "--allowed-media-domains", "nobody.invalid")
    with serving(folder, tmp_path_factory.mktemp("log") / "serve.log", *flags) as running:
        yield running


def body(url: str, tokens: int = 2) -> dict:
    content = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "tiny", "temperature": 0, "max_tokens": tokens, "messages": [{"role": "user", "content": content}]}


async def answer(client: httpx.AsyncClient, url: str, tokens: int = 2) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body(url, tokens))


def words(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def held(client: httpx.AsyncClient) -> dict[str, float]:
    """What would stay if something leaked."""
    lines = (await client.get("/metrics")).text.splitlines()
    named = dict(line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
    cache = [float(value) for name, value in named.items() if name.startswith("penstock_encoder_cache_tokens") and "held" in name]
    load = (await client.get("/load")).json()
    assert cache, "the metric has another name"
    return {"embeddings": cache[0], "running": load["num_requests_running"], "waiting": load["num_requests_waiting"]}


def of_process(pid: int) -> tuple[int, int]:
    """Open files and threads."""
    process = Path(f"/proc/{pid}")
    return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))


async def crowd(client: httpx.AsyncClient, numbers: range) -> None:
    """Sends the cases of these numbers, some at once, and asks about a sound image meanwhile."""
    plain = [data_url(Image.fromarray(base(number))) for number in range(4)]
    bystander = [words(await answer(client, url, 60)) for url in plain]
    cases = [(number, case) for number in numbers if not (case := draw(number)).url.startswith(f"https://{HOST}")]
    for first in range(0, len(cases), AT_ONCE):
        others = asyncio.gather(*[ask(client, *one) for one in cases[first : first + AT_ONCE]])
        at = first // AT_ONCE % 4
        assert words(await answer(client, plain[at], 60)) == bystander[at]
        await others


async def ask(client: httpx.AsyncClient, number: int, case: Case) -> None:
    got = await answer(client, case.url.replace("PORT", "443"))
    told = f"case {number}: {case.kind}: {got.status_code} {got.text[:200]}"
    assert got.status_code == {"read": 200, "refused": 400}.get(case.verdict, got.status_code), told
    if got.status_code != 200:
        assert got.status_code == 400, told
        assert got.json()["error"]["param"] == "messages[0].content[1].image_url.url", told
    elif case.upright is not None and not case.lossy:
        image = Image.fromarray(np.ascontiguousarray(case.upright))
        assert words(got) == words(await answer(client, data_url(image))), told


async def test_a_crowd_of_hostile_images_harms_nobody(server):
    pids = server.process.pid, server.core_pid()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await crowd(client, range(100))  # the threads that images have begun
    await asyncio.sleep(0.5)  # until the connections are closed on the other side as well
    before = [of_process(pid) for pid in pids]
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await crowd(client, range(100, NUMBER))
    nothing, deadline = {"embeddings": 0, "running": 0, "waiting": {}}, time.monotonic() + 10
    files = [count for count, _ in before]
    after = [of_process(pid) for pid in pids]
    while [count for count, _ in after] != files:
        assert time.monotonic() < deadline, (after, before)
        await asyncio.sleep(0.2)
        after = [of_process(pid) for pid in pids]
    for (_, threads), (_, most) in zip(after, before, strict=True):
        assert threads <= most + (os.cpu_count() or 1) + 4  # the event loop's own pool grows up to here
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        while (left := await held(client)) != nothing:
            assert time.monotonic() < deadline, left
            await asyncio.sleep(0.2)
