"""Bodies that cost much more to read than they weigh."""

import asyncio
import threading

import orjson
import pytest

from penstock.gateway.extproc.body import MAX_BODY_BYTES, MAX_WORK, parse_body
from penstock.gateway.extproc.call import Refused
from penstock.gateway.load import prompts
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.picker.state import FleetState


def repeated(piece: bytes, count: int) -> bytes:
    return b'{"model":"m","a":[' + piece * count + b"1]}"


@pytest.mark.parametrize(
    "raw",
    [
        repeated(b"[],", 6_000_000),
        repeated(b"[" * 250 + b"]" * 250 + b",", 40_000),
        repeated(b"1,", 9_000_000),
        repeated(b'{"a":1},', 1_000_000),
        b'{"model":"m",' + b",".join(b'"%d":0' % key for key in range(500_000)) + b"}",
        b'{"model":"m","a":"' + b'\\"' * 1_000_000 + b'","b":[' + b"[],[]," * 1_000_000 + b"1]}",
        b'{"model":"m","a":' + b"[[],[[],[" * 1_000_000 + b'"' + b'\\"' * 1_000_000,  # its string has no end
    ],
    ids=["lists", "deep", "numbers", "objects", "keys", "hidden", "torn"],
)
def test_what_costs_too_much_is_refused_unread(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(raw) <= MAX_BODY_BYTES
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("it was read"))
    with pytest.raises(Refused, match="too many") as refused:
        parse_body(raw)
    assert (refused.value.status, refused.value.reason) == (400, "invalid_body")


def test_long_prompts_are_read_whatever_is_written_in_them() -> None:
    code = 'f(a, [b, {"c": d}]), ' * 500_000
    messages = [{"role": "user", "content": code}]
    assert parse_body(orjson.dumps({"model": "m", "messages": messages})).fields["messages"] == messages
    ids = list(range(1_000_000))
    assert parse_body(orjson.dumps({"model": "m", "prompt": ids})).fields["prompt"] == ids
    assert len(ids) < MAX_WORK


async def none_overdue(library: PromptLibrary) -> None:
    async with asyncio.timeout(60):
        while library._overdue:
            await asyncio.sleep(0.01)


async def test_threads_that_are_overdue_are_counted_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TOKENIZE_TIMEOUT_S", 0.01)
    library, go_on = PromptLibrary(FleetState()), threading.Event()
    started: list[int] = []

    def stuck() -> None:
        started.append(1)
        go_on.wait(10)

    try:
        for _ in range(prompts.THREADS):
            with pytest.raises(TimeoutError):
                await library._work(stuck)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await library._work(lambda: started.append(2))
        assert len(started) <= prompts.THREADS, "what nobody would have waited for was not even queued"
        small = library.at_once([], "/v1/completions", b"{}", {"prompt": "x"}, "", None)
        assert small is not None, "small prompts need no thread"
        go_on.set()
        await none_overdue(library)
        monkeypatch.setattr(prompts, "TOKENIZE_TIMEOUT_S", 10.0)
        assert await library._work(lambda: 8) == 8
    finally:
        go_on.set()
        library.close()


async def test_what_had_not_begun_is_not_done_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TOKENIZE_TIMEOUT_S", 0.05)
    library, go_on, done = PromptLibrary(FleetState()), threading.Event(), list[int]()
    try:
        busy = [asyncio.create_task(library._work(lambda: go_on.wait(10))) for _ in range(prompts.THREADS)]
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await library._work(lambda: done.append(1))
        go_on.set()
        await asyncio.gather(*busy, return_exceptions=True)
        await none_overdue(library)
        monkeypatch.setattr(prompts, "TOKENIZE_TIMEOUT_S", 10.0)
        assert await library._work(lambda: 8) == 8
        assert done == []
    finally:
        go_on.set()
        library.close()
