"""Several frontends on one core: one port, one sum of counts, and each dies alone."""

import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from frontend_process import Server, command, make_llama, serving

from testing import patient
from testing.ports import free_ports

pytestmark = pytest.mark.slow

STREAMS = 16
BODY: dict[str, Any] = {"model": "tiny", "prompt": "the wheel", "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def llama(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


def children(server: Server, module: str) -> set[int]:
    """Processes of the server that run a module."""
    pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return {int(pid) for pid in pids if module in Path(f"/proc/{pid}/cmdline").read_text()}


def frontends(server: Server) -> set[int]:
    return children(server, "processes.process")


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def counted(server: Server, name: str) -> float:
    """A counter, over its labels; a new connection, hence any of the frontends."""
    text = patient.get(f"{server.url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


async def texts(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Of a stream; raises what breaks it, and `RuntimeError` for an error that it tells."""
    async for line in response.content:
        if line.startswith(b'data: {"error"'):
            raise RuntimeError(json.loads(line[6:])["error"]["message"])
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])["choices"][0]["text"]
        elif line.startswith(b"data: [DONE]"):
            return
    raise aiohttp.ClientPayloadError("no [DONE]")


async def talk(server: Server, tokens: int, during: Callable[[], None]) -> list[str | Exception]:
    """So many streams at once, each on a connection of its own; `during` is called when all have begun."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(server.url, connector=connector) as client:
        begun = [asyncio.Event() for _ in range(STREAMS)]

        async def one(started: asyncio.Event) -> str:
            text = ""
            async with client.post("/v1/completions", json={**BODY, "max_tokens": tokens}) as response:
                async for piece in texts(response):
                    text += piece
                    started.set()
            return text

        tasks = [asyncio.create_task(one(started)) for started in begun]
        await asyncio.gather(*(started.wait() for started in begun))
        during()
        return await asyncio.gather(*tasks, return_exceptions=True)  # type: ignore[return-value]


@pytest.mark.req("IPC-11")
def test_a_frontend_dies_alone_and_is_replaced_and_a_signal_drains_all(llama: Path, tmp_path: Path) -> None:
    (admin,) = free_ports(1)
    flags = ("--api-server-count", "2", "--enable-control-endpoints", "--admin-port", str(admin))
    with serving(llama, tmp_path / "log", *flags) as server:
        port, first = int(server.url.rpartition(":")[2]), frontends(server)
        assert len(first) == 2

        # Each request is a new connection, hence any frontend's.
        urls = (server.url, f"http://127.0.0.1:{admin}")
        assert [{patient.get(f"{url}/is_paused").status_code for _ in range(8)} for url in urls] == [{404}, {200}]

        # Another server must not slip in behind the shared port.
        done = subprocess.run(command(llama, port, *free_ports(2), "--api-server-count", "2"), capture_output=True, text=True)
        assert done.returncode == 2 and f"--port {port}" in done.stderr.splitlines()[-1]

        victim = min(first)
        answers = asyncio.run(talk(server, 300, lambda: os.kill(victim, signal.SIGKILL)))
        whole = {answer for answer in answers if isinstance(answer, str)}
        broken = [answer for answer in answers if isinstance(answer, Exception)]
        assert len(whole) == 1 and 0 < len(broken) < STREAMS, "both had streams, and only one's broke"
        assert all(isinstance(answer, aiohttp.ClientError) for answer in broken)

        # The core has ended the requests of the dead one, which nobody waits for.
        until(lambda: len(frontends(server)) == 2 and victim not in frontends(server))
        report = until(lambda: (r := patient.get(f"{server.url}/load").json())["num_requests_running"] == 0 and r)
        assert report["kv_blocks_reclaimable"] == report["kv_blocks_total"]

        # Every scrape tells the sum, whoever answers, and what the dead one had counted is still in it.
        before = counted(server, "penstock_generation_tokens_total")
        assert before >= 300 * (STREAMS - len(broken))
        until(lambda: re.search(r"frontend 3: .*serving tiny", server.log.read_text()))
        answers = asyncio.run(talk(server, 40, lambda: None))
        assert {len(answer) > 0 for answer in answers if isinstance(answer, str)} == {True} and len(answers) == STREAMS
        assert {counted(server, "penstock_generation_tokens_total") for _ in range(8)} == {before + 40 * STREAMS}

        answers = asyncio.run(talk(server, 200, lambda: server.process.send_signal(signal.SIGTERM)))
        assert len({answer for answer in answers if isinstance(answer, str)}) == 1
        assert server.process.wait(timeout=60) == 0


@pytest.mark.req("EG-20", "IPC-11")
def test_the_cores_death_ends_every_frontends_streams_with_its_reason(llama: Path, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "log", "--api-server-count", "2") as server:
        [core] = children(server, "core.ipc.process")
        answers = asyncio.run(talk(server, 4000, lambda: os.kill(core, signal.SIGKILL)))
        assert all(isinstance(answer, RuntimeError) and "signal 9" in str(answer) for answer in answers), answers
        assert server.process.wait(timeout=60) == 1


@pytest.mark.req("IPC-11")
def test_nothing_outlives_a_supervisor_that_is_killed(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A socket's path has 107 characters at most, of which pytest's folders may take most.
    temporary = Path(tempfile.mkdtemp(prefix="penstock-"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    with serving(llama, tmp_path / "log", "--api-server-count", "2") as server:
        family = frontends(server) | children(server, "core.ipc.process")
        assert len(family) == 3
        server.process.kill()
        server.process.wait()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))
        assert list(temporary.iterdir()) == []
    temporary.rmdir()
