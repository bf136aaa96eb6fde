"""A replica whose cores are on several nodes: here, groups of processes that share nothing but TCP."""

import asyncio
import os
import re
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from fake_runner import SLOW_TOKEN, reference
from harness import make_config, make_request
from test_core_process import Frontend, consume
from test_nodes import HOST, free_port, headless, imported

from penstock.engine.commands import ResetPrefixCache
from penstock.engine.config import ConfigError, EngineConfig, ParallelConfig
from penstock.engine.core.ipc.client import CoreClient, CoreError
from penstock.engine.core.ipc.far_cores import FarCores
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.layout import CoreLayout
from penstock.engine.parallel.meeting import Meeting
from penstock.engine.parallel.nodes import cores_placed
from testing.replays import replayed

importable = imported
RUNNER = "fake_runner:FakeRunner"
ANYWHERE = [f"tcp://{HOST}:*"]


def on_nodes(start: int = 0, local: int = 1, size: int = 2, port: int = 0) -> EngineConfig:
    parallel = ParallelConfig(
        data_parallel_size=size,
        data_parallel_size_local=local,
        data_parallel_start_rank=start,
        data_parallel_address=HOST,
        data_parallel_rpc_port=port or free_port(),
        timeout=5.0,
    )
    return msgspec.structs.replace(make_config(), parallel=parallel)


def other(config: EngineConfig, folder, **fields):
    """The node of core 1."""
    parallel = msgspec.structs.replace(config.parallel, data_parallel_start_rank=1)
    return headless(msgspec.structs.replace(config, parallel=parallel, **fields), folder, RUNNER)


@asynccontextmanager
async def two_cores(config: EngineConfig, node, patience: float = 60.0):
    far = FarCores(config, patience=patience)
    cores = [
        CoreClient(config, engine_index=rank, runner=RUNNER, far=far, events_addresses=ANYWHERE, replay_addresses=ANYWHERE)
        for rank in range(config.parallel.data_parallel_size)
    ]
    try:
        ready = await asyncio.gather(*(core.start() for core in cores))
        yield cores, ready
    finally:
        await asyncio.gather(*(core.close() for core in cores))
        if node is not None and node.poll() is None:
            try:
                node.wait(30)
            finally:
                node.kill()


@pytest.mark.req("DX-25")
async def test_a_core_on_another_node_is_as_one_of_this_node(tmp_path):
    """Requests, commands and events; and the end in good order."""
    config = on_nodes()
    node = other(config, tmp_path)
    async with two_cores(config, node) as (cores, ready):
        assert "penstock.engine.core.ipc.stand_in" in Path(f"/proc/{cores[1].pid}/cmdline").read_text()
        for rank, core in enumerate(cores):
            frontend = Frontend()
            for index in range(4):
                await core.add(make_request(index, [rank, index, 1, 2, 3], 9))
            await asyncio.wait_for(frontend.until(core, *range(4)), 60)
            assert frontend.streams == {index: reference([rank, index, 1, 2, 3], 9) for index in range(4)}
            call = asyncio.create_task(core.call(ResetPrefixCache()))
            await asyncio.wait_for(consume(core, call), 60)
            assert (await call) is None
        assert ready[0].event_ports != ready[1].event_ports
        found = await asyncio.to_thread(lambda: list(replayed(ready[1].event_ports.replay)))
        assert found, "the port here leads to the events there"
    assert node.returncode == 0


@pytest.mark.parametrize("how", ["core", "node"])
async def test_a_core_or_a_node_that_dies_fails_its_own_requests_alone(how, tmp_path):
    config = on_nodes()
    node = other(config, tmp_path)
    async with two_cores(config, node) as (cores, _):
        [core] = map(int, Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split())
        for rank, client in enumerate(cores):
            await client.add(make_request(rank, [1, 2, SLOW_TOKEN], 40))
        os.kill(core if how == "core" else node.pid, signal.SIGKILL)
        with pytest.raises(CoreError, match=re.escape(f"data-parallel rank 1 ({HOST}) is gone; the log of its node says why")):
            await asyncio.wait_for(Frontend().until(cores[1], 1), 60)
        frontend = Frontend()
        await asyncio.wait_for(frontend.until(cores[0], 0), 60)
        assert frontend.streams[0] == reference([1, 2, SLOW_TOKEN], 40)
    _, told = node.communicate(timeout=60)
    if how == "core":
        assert node.returncode == 1 and "the core of data-parallel rank 1 was killed by signal 9" in told
        assert "the node of data-parallel rank 0 is gone, or has ended the replica" in told
    deadline = time.monotonic() + 30
    while Path(f"/proc/{core}").exists():
        assert time.monotonic() < deadline, "the core is left behind"
        await asyncio.sleep(0.05)


async def test_a_node_that_differs_is_told_in_what_and_one_that_never_comes_is_named(tmp_path):
    config = on_nodes()
    node = other(config, tmp_path, seed=7)
    differs = f"data-parallel rank 1 ({HOST}) differs from data-parallel rank 0 in its setting seed: 7 there, 0 on"
    with pytest.raises(ConfigError, match=re.escape(differs)):
        async with two_cores(config, node):
            pass
    assert differs in node.communicate(timeout=60)[1]
    port = config.parallel.data_parallel_rpc_port
    with pytest.raises(CoreError, match=rf"data-parallel rank 1 has not come to {HOST}:{port} within 0.1 seconds"):
        async with two_cores(config, None, 0.1):
            pass
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((HOST, port))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"^--data-parallel-rpc-port {port} is in use on {HOST}$"):
            async with two_cores(config, None):
                pass


async def test_a_rank_that_another_node_has_is_refused_there_alone(tmp_path):
    config = on_nodes(size=4)
    parallel = msgspec.structs.replace(config.parallel, data_parallel_start_rank=1, data_parallel_size_local=2)
    far = FarCores(config, patience=60.0)
    meeting = asyncio.create_task(far.streams())
    both = [other(config, tmp_path), headless(msgspec.structs.replace(config, parallel=parallel), tmp_path, RUNNER)]
    while all(node.poll() is None for node in both):
        await asyncio.sleep(0.05)
    [ended] = [node for node in both if node.poll() is not None]
    assert f"ConfigError: data-parallel rank 1 is taken: the node at {HOST} has it" in ended.communicate()[1]
    assert not meeting.done(), "the others are still waited for"
    far.close()
    with pytest.raises(GroupFailed, match="has been closed"):
        await meeting
    for node in both:
        node.kill()
        node.wait()


def test_wires_join_the_ranks_of_cores_that_divide_experts_on_several_nodes():
    parallel = ParallelConfig(data_parallel_size=3, tensor_parallel_size=2, expert_parallel=True)
    layout = CoreLayout.of(parallel, [0, 1])
    assert [layout.node(rank) for rank in range(6)] == [0, 0, 1, 1, 1, 1]
    wires = layout.wires()
    assert [wire[:2] for wire in wires if wire.kind == "core"] == [(0, 2), (0, 4)]
    assert [wire[:2] for wire in wires if wire.kind == "steps"] == [(0, 2), (0, 4)]
    assert [wire[:2] for wire in wires if wire.kind == "experts"] == [(0, 2), (1, 2), (2, 0), (3, 0), (4, 0), (5, 0)]
    assert len(wires) == 10, "nothing moves without --enable-eplb"


def test_flags_and_a_pods_group_say_which_cores_a_node_has():
    config = ParallelConfig(data_parallel_size=8)
    group = {"LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "llm-0.llm.default", "LWS_GROUP_SIZE": "4"}
    found = cores_placed(config, 2, None, None, group)
    assert (found.local_cores, found.data_parallel_address) == (range(4, 6), "llm-0.llm.default")
    assert not found.is_first_node and found.cores_span_nodes
    assert cores_placed(config, 2, 6, "10.0.0.1", group).local_cores == range(6, 8)
    assert cores_placed(config, None, None, None, group) == config and not config.cores_span_nodes
    assert not cores_placed(config, 8, None, None, {}).cores_span_nodes
    assert Meeting.of(found).own == range(4, 6)
    for flags, told in (
        ((2, 0, None), "--data-parallel-size-local 2 of --data-parallel-size 8 needs --data-parallel-address"),
        ((2, 7, "10.0.0.1"), "--data-parallel-size 8: this node would have ranks 7 to 8, and the last one is 7"),
        ((9, None, "10.0.0.1"), "--data-parallel-size 8: this node would have ranks 0 to 8"),
        ((None, 2, None), "--data-parallel-start-rank 2 needs --data-parallel-size-local"),
        ((None, None, "10.0.0.1"), "--data-parallel-address 10.0.0.1 needs --data-parallel-size-local"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            cores_placed(config, *flags, {})
