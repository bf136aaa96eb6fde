"""A real engine process: its prompts under our hashes, its events, its ends, and a reset of its prefix cache."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest
from tokenizing import tokenized

from penstock.api import headers
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.load.foreign import ForeignLoad
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.load.replica_client import ReplicaClient
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.state import FleetState
from penstock.gateway.residency.index import Knowledge
from penstock.prompt.processor import CHAT_PATH
from testing.ports import free_ports

TINY = Path(__file__).parents[3] / "examples" / "models" / "penstock-tiny"
MODEL = Model(id="ns/m", served_names=["tiny"])
MESSAGES = [{"role": "user", "content": "What does a decorator do with the function that it is given? " * 8}]


def start(command: list[str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def same_figures_by_every_name(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    """A picker that reads vLLM's names off our page knows what our load report says, while a request runs."""
    async with session.post(url + CHAT_PATH, json={**body, "max_tokens": 100, "ignore_eos": True, "stream": True}) as answer:
        while not re.search(rb'"content":"[^"]', await answer.content.readline()):
            assert not answer.content.at_eof()
        async with session.post(f"{url}/pause", params={"mode": "keep", "clear_cache": "false"}) as paused:
            assert paused.status == 200, await paused.text()
        async with session.get(f"{url}/load") as load, session.get(f"{url}/metrics") as page:
            ours = msgspec.json.decode(await load.read(), type=LoadReport)
            theirs, traits = ForeignLoad("vllm").read(await page.read(), 0.0)
        assert ours.num_requests_running == theirs.num_requests_running == 1
        assert ours.waiting == theirs.waiting == 0
        assert ours.lora_slots == theirs.lora_slots == 2
        assert ours.kv_cache_usage_perc == pytest.approx(theirs.kv_cache_usage_perc)
        assert ours.kv_cache_usage_perc > 0
        assert (traits.num_blocks, traits.block_size) == (ours.kv_blocks_total + 1, 16)  # one is nobody's


def adapter_in(folder: Path) -> Path:
    """One that changes nothing but its name."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    width: int = orjson.loads((TINY / "config.json").read_bytes())["hidden_size"]
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{module}.lora_A.weight": torch.zeros(4, width), f"{module}.lora_B.weight": torch.zeros(width, 4)}
    save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(orjson.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return folder


@pytest.mark.req("RT-06", "RT-10", "RT-20", "RT-21", "RT-22", "RT-43", "LO-17", "KO-10")
async def test_what_is_believed_of_a_real_engine_is_what_it_finds(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    port, events_port, replay_port = free_ports(3)
    flags = [
        "--served-model-name",
        "tiny",
        "--enable-control-endpoints",
        "--metrics-compat",
        "vllm",
        "--kv-cache-memory-bytes",
        str(2 * 2**20),
    ]
    flags += ["--max-model-len", "512", "--kv-offload-memory-bytes", str(64 * 2**20), "--kv-offload-loads", "always"]
    flags += ["--enable-lora", "--max-loras", "2", "--allow-runtime-lora-updating"]
    adapters = {name: adapter_in(tmp_path / name) for name in ("sql", "chat")}
    ports = ["--port", str(port), "--events-port", str(events_port), "--replay-port", str(replay_port)]
    known: dict[str, Any] = {"uid": "u", "name": "r", "pool": "p", "host": "127.0.0.1", "port": port, "ready": True}
    replica = Replica(**known, events_port=events_port, replay_port=replay_port)
    url, key, follower = f"http://127.0.0.1:{port}", key_of(replica), FleetFollower(FleetState())
    state, log = follower.state, (tmp_path / "log").open("wb")
    command = [sys.executable, "-m", "penstock.cli", "serve", str(TINY), *ports, *flags]
    process = start(command, log)
    library = PromptLibrary(state)
    try:
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(120):
                while process.poll() is None:
                    with contextlib.suppress(aiohttp.ClientError):
                        if (await session.get(f"{url}/ready")).status == 200:
                            break
                    await asyncio.sleep(0.2)
            follower.update(Fleet(models=[MODEL], pools=[Pool(id="p", model="ns/m")], replicas=[replica]))
            learning = asyncio.create_task(library.run(ReplicaClient(session)))
            await until(lambda: library._digests)
            await until(lambda: state.residency.knowledge(key) is Knowledge.EXACT)
            body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}

            async def resident(tenant: str, adapter: str | None = None) -> tuple[RequestView, int]:
                replicas = state.directory.replicas_of(MODEL)
                tokens = await tokenized(library, replicas, body, path=CHAT_PATH, tenant=tenant, adapter=adapter)
                request = RequestView(id="", path=CHAT_PATH, model="tiny", prompts=tokens.prompts, block_size=tokens.block_size)
                return request, int(state.slates.of(MODEL, request, 0.0, comparable=tokens.comparable).found[0])

            async def ask(name: str, tenant: str, adapter: str | None = None) -> None:
                request, believed = await resident(tenant, adapter)
                state.routed(MODEL, RequestView(id=name, path="", model="", prompts=request.prompts), key, believed, 0.0)
                marks = {headers.REQUEST_ID: name, headers.TENANT: tenant}
                async with session.post(url + CHAT_PATH, json=body | {"model": adapter or "tiny"}, headers=marks) as answer:
                    assert answer.status == 200, await answer.text()
                await until(lambda: sum(sum(t.buckets) for t in state.beliefs.truth.models.values()) == int(name))

            await ask("1", "a")
            assert (await resident("a"))[1] > 32
            assert (await resident("b"))[1] == 0  # what another tenant has sent is not shared
            await ask("2", "a")
            await ask("3", "b")
            await ask("4", "b")
            for name, path in adapters.items():
                async with session.post(
                    f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}
                ) as answer:
                    assert answer.status == 200, await answer.text()
                assert (await resident("a", name))[1] == 0  # what was computed without it, or with another, is of no use
                await ask(str(5 + 2 * list(adapters).index(name)), "a", name)
                assert (await resident("a", name))[1] > 32
                await ask(str(6 + 2 * list(adapters).index(name)), "a", name)
            ((first, *_),) = [prompt.block_hashes for prompt in (await resident("a"))[0].prompts]
            for other in "xyzuvw":
                if not state.residency.holds(key, first):
                    break
                text = {"role": "user", "content": f"{other} " * 200}
                async with session.post(url + CHAT_PATH, json=body | {"messages": [text]}) as answer:
                    assert answer.status == 200, await answer.text()
            await until(lambda: not state.residency.holds(key, first))
            assert (await resident("a"))[1] > 32  # it is still in the host's memory
            await ask("9", "a")
            assert state.residency.holds(key, first)
            tally = state.beliefs.truth.models[MODEL.id]
            assert tally.buckets[0] == 9  # every prediction was right to the token
            assert tally.found > 0
            assert tally.miscounted == 0
            async with session.post(f"{url}/reset_prefix_cache") as answer:
                assert answer.status == 200, await answer.text()
            await until(lambda: state.residency.blocks(key) == 0)
            assert (await resident("a"))[1] == 0
            await same_figures_by_every_name(session, url, body)
            learning.cancel()
    finally:
        process.kill()
        process.wait()
        log.close()
        library.close()
        await follower.close()
