"""One server that follows a script, and the real one."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web
from client_servers import TINY, Script, wait_ready

from testing.ports import free_ports


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    """A scripted server in this event loop."""
    made = Script()
    app = web.Application(client_max_size=2**24)
    app.add_routes([web.post("/v1/completions", made.complete), web.post("/v1/chat/completions", made.complete)])
    app.add_routes([web.get("/v1/models", made.models), web.get("/metrics", made.gauges)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `penstock serve` with the demo model and little memory: 128 blocks of 16 tokens."""
    port, events, replay = map(str, free_ports(3))
    flags = ["--port", port, "--events-port", events, "--replay-port", replay, "--num-gpu-blocks-override", "128"]
    flags += ["--max-model-len", "512"]
    command = [sys.executable, "-m", "penstock.cli", "serve", str(TINY), "--served-model-name", "tiny", *flags]
    log = tmp_path_factory.mktemp("engine") / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(process, url, log)
        yield url
    finally:
        process.kill()
        process.wait()
