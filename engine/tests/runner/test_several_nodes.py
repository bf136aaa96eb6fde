"""Ranks on several nodes, here groups of processes that share nothing but TCP: the tokens of one process."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_ranks import Ranks
from test_core_with_runner import SCHEDULER, Engine, requests
from test_pipeline_parallel import NUM_BLOCKS, StagedEngine, with_logprobs
from test_tensor_parallel import ALL_LOGPROBS, Told, alone, in_a_crowd, prompt, rank_runner

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from test_nodes import HOST, free_port

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_executor
from penstock.engine.parallel.group import Group, Wires
from penstock.engine.parallel.layout import Layout, Wire
from penstock.engine.parallel.shared_memory import SharedMemory

pytestmark = pytest.mark.slow


def test_ranks_on_two_nodes_have_the_bits_of_one_node(checkpoint, driver):
    """The same model among the same number of ranks, which share memory or do not; steps run from tapes where they can."""
    path, tokens = checkpoint("qwen3-windows"), prompt(1, 40)
    layout = Layout(4, 1, 2)

    def on(nodes: int) -> list[tuple[Told, bool]]:
        each = 4 // nodes
        memories = [SharedMemory.create(4, 1 << 14) for _ in range(nodes)]
        ends = {wire: socket.socketpair() for wire in layout.wires()} if nodes > 1 else dict[Wire, Any]()

        def life(rank: int) -> tuple[Told, bool]:
            wires = Wires(
                [(pair[0].fileno(), wire.receiver) for wire, pair in ends.items() if wire.sender == rank],
                [pair[1].fileno() for wire, pair in ends.items() if wire.receiver == rank],
            )
            runner = rank_runner(path, Group(rank, 4, memories[rank // each], "", 60.0, wires=wires))
            told = alone(driver(runner), tokens, ALL_LOGPROBS, 33)
            return told, told.same_bits(in_a_crowd(driver(runner), tokens, ALL_LOGPROBS))

        found = Ranks(4, life).results()
        for shared in (*memories, *(end for pair in ends.values() for end in pair)):
            shared.close()
        return found

    near, far = on(1), on(2)
    for (told, same), (expected, _) in zip(far, near, strict=True):
        assert told.same_bits(expected) and same


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_an_engine_on_two_nodes_answers_as_one_process(ranks, checkpoint, warmed, request):
    """Sums or hidden states cross, and plans and results; the other node is started as a person does."""
    path, port = checkpoint("qwen3-windows"), free_port()
    fields = {
        "dtype": "float32",
        "max_model_len": 320,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "nnodes": 2,
        "master_addr": HOST,
        "master_port": port,
        **ranks,
    } | {name: getattr(SCHEDULER, name) for name in ("max_num_seqs", "max_num_batched_tokens", "watermark")}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "penstock.cli", "serve", str(path), *flags, "--device=cpu", "--headless"]
    other = subprocess.Popen([*command, "--node-rank=1"])
    request.addfinalizer(other.kill)
    config = EngineArgs(model=str(path), node_rank=0, **fields).config("cpu")
    executor, blocks = build_executor(config)
    request.addfinalizer(executor.close)
    assert blocks == NUM_BLOCKS
    whole, engine = Engine(warmed("qwen3-windows"), 1, NUM_BLOCKS), StagedEngine(config, executor)
    batch = with_logprobs(requests(adjusted=True))
    assert engine.run(batch) == whole.run(batch)
    for index, found in engine.logprobs.items():
        np.testing.assert_allclose(found, whole.logprobs[index], rtol=1e-5, atol=1e-5)
    assert all(mark.calls > 50 for mark in executor.progress()), "every node tells how far it has come"
    executor.close()
    assert other.wait(60) == 0


def test_each_node_takes_its_share_of_the_hosts_memory(checkpoint):
    memory = SharedMemory.create(2)
    whole, half = (
        rank_runner(checkpoint("llama"), Group(0, 2, memory, "", 60.0, neighbours=count)).measure_memory() for count in (1, 2)
    )
    assert whole.total == 2 * half.total
