"""`penstock serve` and `LLM` with a model among processes: the answers of one process, and what clients see of a death."""

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from frontend_process import Server, make_llama, serving
from openai import OpenAI

from penstock.engine import LLM, SamplingParams

PROMPTS = ["the river turns the wheel", "a mill", "water and stone and water and stone"]


@pytest.fixture(scope="module")
def llama(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


def answers(server: Server) -> list[str]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        completion = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=12, temperature=0.0)
        return [choice.text for choice in completion.choices]


def children(pid: int) -> list[int]:
    return [int(child) for thread in Path(f"/proc/{pid}/task").iterdir() for child in (thread / "children").read_text().split()]


def wait_gone(*pids: int) -> None:
    """They end with whoever started them, each by itself."""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process is left behind"
        time.sleep(0.05)


@pytest.mark.req("DX-24")
def test_two_ranks_answer_as_one_process_and_a_death_ends_them_all_by_name(llama, tmp_path):
    with serving(llama, tmp_path / "one.log") as server:
        expected = answers(server)
    assert len(set(expected)) == len(PROMPTS)
    with serving(llama, tmp_path / "two.log", "-tp", "2") as server:
        assert answers(server) == expected
        core = server.core_pid()
        ranks = children(core)
        assert len(ranks) == 2
        for rank in ranks:
            assert "aiohttp" not in Path(f"/proc/{rank}/maps").read_text(), "a rank holds no HTTP server"
        body = {"model": "tiny", "prompt": "a mill", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            stream.readline()
            os.kill(ranks[1], signal.SIGKILL)
            told = stream.read().decode()
        last = json.loads([line for line in told.splitlines() if line.startswith("data: {")][-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_dead"
        assert f"rank 1 (process {ranks[1]}) was killed by signal 9" in last["error"]["message"]
        assert server.process.wait(60) == 1
        wait_gone(core, *ranks)


def test_python_has_ranks_too(llama):
    with LLM(str(llama), kv_cache_memory_bytes=4 << 20) as one:
        expected = [output.outputs[0].text for output in one.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0))]
    with LLM(str(llama), kv_cache_memory_bytes=4 << 20, tensor_parallel_size=2) as two:
        mine = children(os.getpid())
        below = [*mine, *(child for pid in mine for child in children(pid))]
        ranks = [pid for pid in below if "parallel.worker" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(ranks) == 2
        assert [
            output.outputs[0].text for output in two.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0))
        ] == expected
    wait_gone(*ranks)
