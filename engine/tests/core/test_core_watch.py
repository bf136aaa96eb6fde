"""What a core leaves behind when it hangs, and when its frontend is killed while it loads."""

import asyncio
import sys
import time
from pathlib import Path

import msgspec
import pytest
from fake_runner import HANGING_TOKEN
from harness import make_config, make_request

from penstock.engine.core.ipc.client import CoreClient


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


async def test_a_step_that_hangs_is_shown_in_the_log_with_its_stack(capfd):
    config = msgspec.structs.replace(make_config(), watchdog_timeout=1.0)
    client = CoreClient(config, runner="fake_runner:HangingRunner")
    try:
        await client.start()
        listening = asyncio.create_task(anext(client.outputs()))
        await client.add(make_request(0, [HANGING_TOKEN], 5))
        log, deadline = "", time.monotonic() + 60
        while "in execute" not in log and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            log += capfd.readouterr().err
        assert "Timeout (0:00:01)" in log and "fake_runner.py" in log and "in execute" in log
        listening.cancel()
    finally:
        assert client._process is not None
        client._process.kill()
        await client.close()


@pytest.mark.req("IPC-11")
async def test_a_frontend_killed_while_the_model_loads_leaves_neither_process_nor_folder(tmp_path):
    script = (
        "import asyncio, tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from harness import make_config\n"
        "from penstock.engine.core.ipc.client import CoreClient\n"
        "async def main():\n"
        "    client = CoreClient(make_config(), runner='fake_runner:SlowLoader', shared=True)\n"
        "    task = asyncio.create_task(client.start())\n"
        "    while client.pid is None:\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(client.pid, flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    frontend = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert frontend.stdout is not None
    core = int(await asyncio.wait_for(frontend.stdout.readline(), 60))
    # It has read how to start once it watches for the frontend's end; further frontends would meet it in the folder.
    deadline = time.monotonic() + 60
    while len(list(Path(f"/proc/{core}/task").iterdir())) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == 1
    frontend.kill()
    await frontend.wait()
    while (Path(f"/proc/{core}").exists() or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert list(tmp_path.iterdir()) == [] and not Path(f"/proc/{core}/cmdline").exists()
