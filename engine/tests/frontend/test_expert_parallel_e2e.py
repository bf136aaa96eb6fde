"""Cores that divide experts, which move: the answers of one core, an idle core that serves, and a death that all notice."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_parallel_e2e import PROMPTS, children, started_since, wait_gone

from penstock.engine import LLM, AsyncLLM, ConfigError, SamplingParams
from penstock.engine.args import EngineArgs
from penstock.engine.commands import ReloadWeights, Sleep, WakeUp
from penstock.engine.frontend.python.request_output import RequestFailed
from testing.ports import free_ports

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SIZE = {"kv_cache_memory_bytes": 4 << 20, "max_model_len": 2048}


@pytest.fixture(scope="module")
def mixtral(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, in float32, with five experts: three and two of each layer on two ranks."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    path = tmp_path_factory.mktemp("mixtral")
    MixtralForCausalLM(config).to(torch.float32).save_pretrained(path)
    for file in tokenizer_files.iterdir():
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def expected(mixtral: Path) -> list[str]:
    """The answers of one core."""
    with LLM(str(mixtral), in_process=True, **SIZE) as one:
        return [output.outputs[0].text for output in one.generate(PROMPTS, GREEDY, progress=False)]


async def answer(llm: AsyncLLM, prompt: str, rank: int, params: SamplingParams = GREEDY) -> str:
    text = ""
    async for output in llm.generate(prompt, params, data_parallel_rank=rank):
        text = output.outputs[0].text
    return text


@contextmanager
def other_node(model: Path, port: int, flags: dict[str, Any]) -> Iterator[int]:
    """The node of core 1, as a person starts it; its process."""
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items()]
    experts = ["--enable-expert-parallel", "--enable-eplb", f"--eplb-config={json.dumps(flags['eplb_config'])}"]
    place = ["-dp=2", "-dpl=1", "-dpr=1", "-dpa=127.0.0.1", f"-dpp={port}", "--headless"]
    command = [sys.executable, "-m", "penstock.cli", "serve", str(model), *sizes, *experts, *place]
    with subprocess.Popen(command) as other:
        try:
            yield other.pid
            assert other.wait(60) == 1, "the replica has failed"
        finally:
            other.kill()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
async def test_two_cores_answer_as_one_while_the_other_idles_and_end_together(nodes, mixtral, expected):
    eplb = {"window_size": 20, "step_interval": 20, "num_redundant_experts": 1}
    flags = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": eplb, **SIZE}
    before, elsewhere = children(os.getpid()), nullcontext(None)
    if nodes == 2:
        [port] = free_ports(1)
        elsewhere = other_node(mixtral, port, flags)
        flags |= {"data_parallel_size_local": 1, "data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": port}
    async with AsyncExitStack() as stack:
        node = stack.enter_context(elsewhere)
        llm = await stack.enter_async_context(AsyncLLM.from_args(EngineArgs(model=str(mixtral), **flags)))
        cores = [pid for pid in (*started_since(before), *(children(node) if node else ())) if pid != node]
        # One core works, and the other one has nothing but its experts to give.
        assert await answer(llm, PROMPTS[0], 1) == expected[0]
        both = await asyncio.gather(*(answer(llm, prompt, rank) for prompt in PROMPTS for rank in (0, 1)))
        assert both == [text for text in expected for _ in range(2)]
        await _check_quiet(cores)
        assert await answer(llm, PROMPTS[1], 0) == expected[1]
        await llm.call(Sleep(level=2))
        await llm.call(WakeUp())
        await llm.call(ReloadWeights())
        assert await answer(llm, PROMPTS[2], 1) == expected[2]
        # Weights are read again while streams run: all ranks change them between the same two steps.
        long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        alone = [await answer(llm, PROMPTS[0], rank, long) for rank in (0, 1)]
        running = [asyncio.create_task(answer(llm, PROMPTS[0], rank, long)) for rank in (0, 1)]
        await llm.call(ReloadWeights())
        assert await asyncio.gather(*running) == alone
        await _check_moved(llm)
        started = asyncio.create_task(answer(llm, PROMPTS[0], 0, SamplingParams(max_tokens=1900, ignore_eos=True)))
        while not len(llm.ranks[0].egress):
            await asyncio.sleep(0.01)
        os.kill(cores[-1], signal.SIGKILL)
        with pytest.raises(RequestFailed):
            await asyncio.wait_for(started, 60)
        assert llm.unhealthy() is not None
    wait_gone(*cores)


async def _check_moved(llm: AsyncLLM) -> None:
    """Experts have moved meanwhile, as the first core tells for all."""
    deadline = time.monotonic() + 60
    while (told := llm.ranks[0].metrics.stats.experts) is None or not (told.rebalances and told.moved_bytes):
        assert time.monotonic() < deadline, f"nothing has moved: {told}"
        await answer(llm, PROMPTS[0], 1)
    assert 0 < told.balancedness <= 1 and all(told.served)
    assert llm.ranks[1].metrics.stats.experts is None


async def _check_quiet(cores: list[int]) -> None:
    """Within a while, no core makes steps any more."""
    deadline = time.monotonic() + 60
    while True:
        before = [_switches(pid) for pid in cores]
        await asyncio.sleep(0.5)
        if all(now - then < 200 for then, now in zip(before, map(_switches, cores), strict=True)):
            return
        assert time.monotonic() < deadline, "idle cores keep making steps"


def _switches(pid: int) -> int:
    """How often a process has gone to sleep."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


@pytest.mark.req("DX-11")
def test_what_cannot_be_divided_is_refused_with_the_arithmetic(mixtral):
    def refused(words: str, **flags: object) -> None:
        with pytest.raises(ConfigError, match=words):
            EngineArgs(**{"model": str(mixtral), "enable_expert_parallel": True, **flags}).config()  # type: ignore[arg-type]

    refused(
        "LlamaForCausalLM has no experts",
        data_parallel_size=2,
        model=str(Path(__file__).parents[3] / "examples/models/penstock-tiny"),
    )
    refused("5 experts are fewer than the 6 ranks", data_parallel_size=6)
    refused("--data-parallel-size 2 does not go with --pipeline-parallel-size 2", data_parallel_size=2, pipeline_parallel_size=2)
    eplb = {"enable_eplb": True, "data_parallel_size": 2}
    words = r"5 experts \+ num_redundant_experts 2 cannot be divided among 2 ranks; possible numbers: 1, 3, 5$"
    refused(words, **eplb, eplb_config={"num_redundant_experts": 2})
    refused("5 experts .* 7 are more than a copy of each expert", **eplb, eplb_config={"num_redundant_experts": 7})
    for words, config in (
        ("--eplb-config: window_size: must be at least 1", {"window_size": 0}),
        ("--eplb-config: step_intervall: there is no such field; did you mean step_interval", {"step_intervall": 5}),
        ("--eplb-config: use_async: experts always move beside steps; remove it", {"use_async": False}),
        ("--eplb-config: log_balancedness: the metric penstock_expert_balancedness", {"log_balancedness": True}),
    ):
        refused(words, **eplb, eplb_config=config)
    refused("--eplb-config needs --enable-eplb", data_parallel_size=2, eplb_config={"use_async": True})
    refused("--enable-eplb: there is one rank", enable_eplb=True)
    refused("--enable-eplb needs --enable-expert-parallel", **eplb, enable_expert_parallel=False)
    refused("make one step after the other", data_parallel_size=2, async_scheduling=True)
