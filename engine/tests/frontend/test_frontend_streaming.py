"""Streams on their connections: what is written, when, and to whom."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from frontend_fakes import FakeCore, step_frame

from penstock.engine.config import ModelConfig
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.http.server import ApiServer
from penstock.engine.frontend.http.streaming import EventStream
from penstock.engine.frontend.openai.completion_format import CompletionFormat
from penstock.engine.messages import Finished, FinishReason
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.processor import PromptProcessor


class Site:
    """A served engine whose core says what the test says, and raw connections to it."""

    def __init__(self, core: FakeCore, port: int) -> None:
        self.core, self._port = core, port
        self._live = 0

    async def ask(self, version: str = "1.1", **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection with a streamed completion asked for; the core has it."""
        body = json.dumps({"model": "m", "prompt": "the mill", "stream": True, **fields}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        self._live += fields.get("n", 1)
        async with asyncio.timeout(60):
            while len(self.core.added) < self._live:
                await asyncio.sleep(0.005)
        return reader, writer


@pytest.fixture
async def site(tokenizer_files: Path) -> AsyncIterator[Site]:
    async with serving(tokenizer_files) as running:
        yield running


@asynccontextmanager
async def serving(tokenizer_files: Path) -> AsyncIterator[Site]:
    model = ModelConfig(
        path=tokenizer_files, served_names=("m",), architecture="x", dtype="float32", max_model_len=64, eos_token_ids=(1,)
    )
    bundle = PromptBundle.from_checkpoint(tokenizer_files, served_names=("m",), block_size=4, hash_seed="s", max_model_len=64)
    core = FakeCore()
    llm = AsyncLLM(core, model, PromptProcessor(bundle))
    runner = ApiServer(llm).runner(shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await llm.start()
    try:
        yield Site(core, runner.addresses[0][1])
    finally:
        await runner.cleanup()
        await llm.close()


async def within(reading: Any) -> Any:
    return await asyncio.wait_for(reading, 60)


async def chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a body; empty: the last."""
    size = int(await within(reader.readline()), 16)
    return (await within(reader.readexactly(size + 2)))[:-2]


def texts(data: bytes) -> list[tuple[int, str]]:
    """(choice, text) of every event."""
    events = [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event.startswith(b"data: {")]
    return [(choice["index"], choice["text"]) for event in events for choice in event["choices"]]


@pytest.mark.req("EG-13")
async def test_a_step_is_one_chunk_for_all_choices_and_the_end_comes_in_one(site: Site) -> None:
    reader, writer = await site.ask(n=2)
    site.core.say(step_frame({0: [70], 1: [71]}))
    head = await within(reader.readuntil(b"\r\n\r\n"))
    assert b"transfer-encoding: chunked" in head.lower()
    first = texts(await chunk(reader))
    site.core.say(step_frame({0: [72], 1: [73]}))
    second = texts(await chunk(reader))
    assert [number for number, _ in first + second] == [0, 1, 0, 1]
    site.core.say(step_frame({0: [74], 1: [75]}, [Finished(0, FinishReason.LENGTH), Finished(1, FinishReason.LENGTH)]))
    end = await chunk(reader)
    assert len(texts(end)) == 2 and end.endswith(b"data: [DONE]\n\n")
    assert await chunk(reader) == b""
    writer.close()


async def test_a_connection_is_kept_for_the_next_stream(site: Site) -> None:
    reader, writer = await site.ask()
    for number in range(2):
        site.core.say(step_frame({number: [70]}))
        await within(reader.readuntil(b"\r\n\r\n"))
        site.core.say(step_frame({number: [71]}))
        site.core.say(step_frame({number: [72]}, [Finished(number, FinishReason.LENGTH)]))
        while await chunk(reader):
            pass
        if number == 0:
            body = b'{"model": "m", "prompt": "x", "stream": true}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            async with asyncio.timeout(60):
                while len(site.core.added) < 2:
                    await asyncio.sleep(0.005)
    writer.close()


async def test_http_1_0_gets_no_chunks_and_the_end_of_the_connection(site: Site) -> None:
    reader, writer = await site.ask(version="1.0")
    for at in range(3):
        site.core.say(step_frame({0: [70 + at]}))
        await asyncio.sleep(0.02)
    site.core.say(step_frame({0: [73]}, [Finished(0, FinishReason.LENGTH)]))
    head, _, body = (await within(reader.read())).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n") and len(texts(body)) == 4
    writer.close()


@pytest.mark.req("EG-16")
async def test_who_reads_again_gets_what_has_gathered_without_a_further_token(site: Site) -> None:
    reader, writer = await site.ask()
    transport = writer.transport
    site.core.say(step_frame({0: [70]}))
    await within(reader.readuntil(b"\r\n\r\n"))
    transport.pause_reading()
    steps = 30_000
    for _ in range(steps):
        site.core.say(step_frame({0: [71]}))
    other, other_writer = await site.ask()  # whose first token comes after all of them
    site.core.say(step_frame({1: [70]}))
    await within(other.readuntil(b"\r\n\r\n"))
    transport.resume_reading()
    seen, events = 0, 0
    while seen < steps + 1:
        new = texts(await chunk(reader))
        seen, events = seen + sum(len(text) for _, text in new), events + len(new)
    assert events < steps, "it had fallen behind, and what had gathered came at once"
    for each in (writer, other_writer):
        each.close()


async def test_an_answer_that_cannot_be_told_fails_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    told = CompletionFormat.chunk

    def broken(self: CompletionFormat, choice: Any, delta: Any) -> bytes:
        if choice.index == 0 and choice.num_tokens == 2:
            raise ZeroDivisionError("of the test")
        return told(self, choice, delta)

    monkeypatch.setattr(CompletionFormat, "chunk", broken)
    bad, bad_writer = await site.ask()
    good, good_writer = await site.ask()
    site.core.say(step_frame({0: [70], 1: [70]}))
    await within(bad.readuntil(b"\r\n\r\n"))
    site.core.say(step_frame({0: [71], 1: [71]}))
    site.core.say(step_frame({1: [72]}, [Finished(1, FinishReason.LENGTH)]))
    body = await within(good.read(2**20))
    while not body.endswith(b"0\r\n\r\n"):
        body += await within(good.read(2**20))
    assert b"[DONE]" in body
    rest = await within(bad.read())
    assert b"[DONE]" not in rest and rest.endswith(b"\r\n0\r\n\r\n") and b"its log says more" in rest
    assert site.core.aborted == [[0]]
    for writer in (bad_writer, good_writer):
        writer.close()


def test_aiohttp_has_what_is_used_beyond_its_documentation() -> None:
    """A pass over a frame writes to many connections, and a coroutine of `StreamResponse.write` for each would be most of a
    token's cost: so a stream asks the connection whether it is full, and writes to its transport. The other two are the only ways
    to give an error that comes before any handler OpenAI's shape."""
    assert isinstance(BaseProtocol.writing_paused, property)
    assert "transport" in BaseProtocol.__slots__
    assert inspect.iscoroutinefunction(web.AppRunner._make_server)
    assert list(inspect.signature(web.RequestHandler.handle_error).parameters) == ["self", "request", "status", "exc", "message"]


@pytest.mark.parametrize("owner, name", [(web.StreamResponse, "prepare"), (EventStream, "take")])
async def test_a_client_that_goes_as_its_stream_begins_is_no_failure(
    site: Site, owner: Any, name: str, monkeypatch, caplog
) -> None:
    """Between the first token and what is written of it: nothing is logged, and the core hears of it."""
    usual, protocols = getattr(owner, name), list[Any]()

    def connected(self: web.RequestHandler, transport: Any) -> None:
        opened(self, transport)
        protocols.append(self)

    def going(self: Any, *given: Any) -> Any:
        protocols[0].transport.close()
        return usual(self, *given)

    opened = web.RequestHandler.connection_made
    monkeypatch.setattr(web.RequestHandler, "connection_made", connected)
    monkeypatch.setattr(owner, name, going)
    reader, writer = await site.ask()
    site.core.say(step_frame({0: [70]}))
    await within(reader.read())
    async with asyncio.timeout(60):
        while not site.core.aborted:
            await asyncio.sleep(0.005)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    writer.close()
