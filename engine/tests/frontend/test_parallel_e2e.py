"""`penstock serve` and `LLM` with a model among processes: the answers of one process, and what clients see of a death."""

import json
import os
import re
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from frontend_process import Server, make_llama, serving
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from procfs import children

from penstock.engine import LLM, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = ["the river turns the wheel", "a mill", "water and stone and water and stone"]


@pytest.fixture(scope="module")
def llama(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


def answers(server: Server) -> list[str]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        completion = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=12, temperature=0.0)
        return [choice.text for choice in completion.choices]


def started_since(before: list[int]) -> list[int]:
    """Processes of this one, but for those of tests that ran in it before."""
    return [pid for pid in children(os.getpid()) if pid not in before]


def wait_gone(*pids: int) -> None:
    """They end with whoever started them, each by itself."""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process is left behind"
        time.sleep(0.05)


@pytest.mark.req("DX-24", "DX-09")
@pytest.mark.parametrize("flag", ["-tp", "-pp"])
def test_two_ranks_answer_as_one_process_and_a_death_ends_them_all_by_name(llama, tmp_path, flag):
    with serving(llama, tmp_path / "one.log") as server:
        expected = answers(server)
    assert len(set(expected)) == len(PROMPTS)
    with serving(llama, tmp_path / "two.log", flag, "2") as server:
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


@pytest.mark.parametrize("quantization", [None, "int8_per_channel_weight_only"], ids=["whole", "quantized"])
def test_grammars_and_pages_from_host_memory_are_those_of_one_process(llama, quantization):
    """A small cache gives up the pages of most prompts, so the second time they come back from the memory of each rank. Rows
    with a grammar and rows without one share the steps."""
    form, prompts = r"[a-d]{3}(-[0-9]{2}){6}", [f"{number} " + "the river turns the wheel " * 20 for number in range(6)]
    params = [
        SamplingParams(max_tokens=30, seed=at, ignore_eos=not at % 2, structured_outputs={"regex": form} if at % 2 else None)  # type: ignore[arg-type]
        for at in range(len(prompts))
    ]
    sizes = {
        "max_model_len": 256,
        "num_gpu_blocks_override": 20,
        "kv_offload_memory_bytes": 8 << 20,
        "kv_offload_loads": "always",
    }
    told: list[list[list[int]]] = []
    for ranks in (1, 2):
        with LLM(str(llama), quantization=quantization, tensor_parallel_size=ranks, **sizes) as llm:
            for _ in range(2):
                outputs = [output.outputs[0] for output in llm.generate(prompts, params, progress=False)]
                assert all(re.fullmatch(form, output.text) for output in outputs[1::2])
                told.append([list(output.token_ids) for output in outputs])
            wait_loaded(llm)
    assert len({tuple(stream) for stream in told[0]}) == len(prompts)
    assert told[1:] == told[:1] * 3


def wait_loaded(llm: LLM) -> None:
    """Until a report of the core counts pages that came from host memory, and none that failed."""
    deadline = time.monotonic() + 60
    while (stats := llm._llm.metrics.stats) is None or stats.offload is None or not stats.offload.memory.loaded_bytes:
        assert time.monotonic() < deadline, "no page was loaded"
        time.sleep(0.05)
    assert stats.offload.memory.failed_pages == 0
