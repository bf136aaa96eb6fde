"""An engine on several nodes: here, groups of processes that share nothing but TCP."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from grids import mostly_slow

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from fake_runner import reference
from forked_ranks import Ranks
from harness import make_config
from rank_runners import DYING_TOKEN, OTHER_TOKEN
from test_comm import DTYPES, partials
from test_process_executor import RUNNER, Engine, gone, importable

from penstock.engine.config import ConfigError, EngineConfig, ParallelConfig
from penstock.engine.parallel import node_words
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.expert_group import CoreExperts, expert_group
from penstock.engine.parallel.fingerprint import fingerprint
from penstock.engine.parallel.frames import receive_frame, send_frame
from penstock.engine.parallel.layout import Layout, Wire
from penstock.engine.parallel.node_words import NodeHello, TurnedAway, WireHello
from penstock.engine.parallel.nodes import placed
from penstock.engine.parallel.rendezvous import Master, join
from penstock.engine.parallel.shared_comm import SharedComm
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.kernels.collective.reference import add_in_order

HOST = "127.0.0.1"
HEADLESS = """
import logging, sys
import msgspec
from pathlib import Path
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.headless import serve
from penstock.engine.parallel.words import dec_hook
logging.basicConfig(level=logging.INFO)
config = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=EngineConfig, dec_hook=dec_hook)
try:
    sys.exit(serve(config, sys.argv[2]))
except (ConfigError, GroupFailed) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
imported = importable


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def on_nodes(config: EngineConfig, nodes: int, node: int = 0, port: int = 0) -> EngineConfig:
    parallel = msgspec.structs.replace(
        config.parallel, nnodes=nodes, node_rank=node, master_addr=HOST, master_port=port or free_port()
    )
    return msgspec.structs.replace(config, parallel=parallel)


def headless(config: EngineConfig, folder: Path, runner: str = RUNNER) -> subprocess.Popen[str]:
    """Node 1 of the same engine, or whichever the configuration says."""
    if config.parallel.is_first_node:
        config = msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, node_rank=1))
    path = folder / f"node-{time.monotonic_ns()}"
    path.write_bytes(msgspec.msgpack.encode(config, enc_hook=str))
    return subprocess.Popen([sys.executable, "-c", HEADLESS, str(path), runner], stderr=subprocess.PIPE, text=True)


def config_of(world: int, timeout: float = 1.5, depth: int = 1) -> EngineConfig:
    parallel = ParallelConfig(tensor_parallel_size=world, timeout=timeout)
    return on_nodes(msgspec.structs.replace(make_config(depth=depth), parallel=parallel), 2)


class TwoNodes(Engine):
    """An engine whose later ranks are on another node."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self.other = headless(config, folder)
        try:
            super().__init__(config.parallel.world, config=config)
        except BaseException:
            self.other.kill()
            raise

    def ended(self) -> str:
        """What the other node says at its end."""
        _, told = self.other.communicate(timeout=60)
        return told


@pytest.fixture
def two_nodes(request, tmp_path):
    """`two_nodes(world)`: an engine that is closed after the test."""

    def make(world: int, timeout: float = 1.5) -> TwoNodes:
        engine = TwoNodes(config_of(world, timeout), tmp_path)
        request.addfinalizer(engine.other.kill)
        request.addfinalizer(engine.executor.close)
        return engine

    return make


@pytest.mark.req("DX-03", "IPC-07")
def test_consecutive_ranks_share_a_node_and_wires_join_the_nodes():
    assert Layout(4, 2, 2).wires() == [Wire(rank, rank + 4) for rank in range(4)], "a stage is on one node: no sum crosses"
    across = Layout(4, 1, 2)
    assert [list(across.on_node(node)) for node in range(2)] == [[0, 1], [2, 3]]
    assert across.wires() == [Wire(0, 2), Wire(1, 2), Wire(2, 0), Wire(3, 0)]
    assert Layout(2, 2, 4).wires() == [Wire(0, 1), Wire(0, 2), Wire(1, 0), Wire(1, 3), Wire(2, 3), Wire(3, 2)]
    with pytest.raises(
        ConfigError, match="--nnodes 2: 3 tensor parallel x 1 pipeline parallel = 3 ranks cannot be divided among"
    ):
        Layout.of(ParallelConfig(tensor_parallel_size=3, nnodes=2))


@pytest.mark.req("DX-01", "DX-02")
def test_ranks_of_a_stage_follow_one_another_and_those_of_a_pipeline_stride():
    """16 ranks in four stages, each on a node; and ranks of two cores, which come before those of a stage."""
    layout = Layout(tensor=4, stages=4, nodes=4)
    assert [layout.stage(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    groups = [[*layout.of_stage(stage)] for stage in range(4)]
    assert groups[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]] and [*itertools.chain(*groups)] == [*range(16)]
    assert layout.wires() == [Wire(rank, rank + 4) for rank in range(12)]
    parallel, memory = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, expert_parallel=True), SharedMemory.create(4)
    places = [(core, rank) for core in range(2) for rank in range(2)]
    found = [expert_group(CoreExperts((os.dup(memory.fd),), core), rank, parallel, 1.0, None) for core, rank in places]
    assert [group.rank for group in found] == [0, 1, 2, 3] and [group.core for group in found] == [0, 0, 1, 1]


def test_a_pods_group_says_which_nodes_there_are():
    config, group = (
        ParallelConfig(tensor_parallel_size=4),
        {
            "LWS_GROUP_SIZE": "2",
            "LWS_WORKER_INDEX": "1",
            "LWS_LEADER_ADDRESS": "llm-0.llm.default",
        },
    )
    found = placed(config, None, None, None, group)
    assert (found.nnodes, found.node_rank, found.master_addr) == (2, 1, "llm-0.llm.default")
    given = placed(config, 4, 3, "10.0.0.1", group)
    assert (given.nnodes, given.node_rank, given.master_addr) == (4, 3, "10.0.0.1")
    assert placed(config, None, None, None, {}) == config
    for flags, environment, told in (
        ((2, 0, None), {}, "--nnodes 2 needs --master-addr: the address of node 0 (or LWS_LEADER_ADDRESS)"),
        ((2, 2, "10.0.0.1"), {}, "--node-rank 2: with --nnodes 2 the nodes are 0 to 1"),
        ((None, 1, None), {}, "--node-rank 1 needs --nnodes"),
        ((None, None, None), {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE is 'two'"),
        ((3, 0, "10.0.0.1"), {}, "4 ranks cannot be divided among 3 nodes"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            placed(config, *flags, environment)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_across_nodes_have_the_bits_of_one_node(collectives, dtype):
    """Three ranks on two nodes, each of which has memory of its own; messages of many pieces."""
    layout, slot = Layout(3, 1, 3), 1 << 12
    memories, sockets = [SharedMemory.create(3, slot) for _ in range(3)], dict[Wire, tuple[socket.socket, socket.socket]]()
    for wire in layout.wires():
        sockets[wire] = socket.socketpair()
    given = {rows: partials(3, rows, 515, dtype) for rows in (1, 2, 9, 40)}

    def life(rank: int):
        outgoing = [(ends[0].fileno(), wire.receiver) for wire, ends in sockets.items() if wire.sender == rank]
        incoming = [ends[1].fileno() for wire, ends in sockets.items() if wire.receiver == rank]
        comm = SharedComm(memories[rank], rank, collectives, 60.0, outgoing, incoming)
        sums = [comm.all_reduce(xs[rank]) for _ in range(20) for xs in given.values()]
        joined = comm.all_gather(given[9][rank])
        comm.barrier()
        return sums[-len(given) :], joined, comm.broadcast(b"told" if rank == 1 else None, 1)

    for sums, joined, told in Ranks(3, life).results():
        for result, xs in zip(sums, given.values(), strict=True):
            assert (result == add_in_order(xs)).all()
        assert (joined == torch.cat(given[9], -1)).all() and told == b"told"
    for shared in (*memories, *(end for ends in sockets.values() for end in ends)):
        shared.close()


def test_ranks_on_two_nodes_answer_as_one_process_and_end_in_good_order(two_nodes):
    engine = two_nodes(4)
    pids = engine.executor.pids
    children = [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
    assert set(pids[:2]) <= set(children) and not set(pids[2:]) & set(children) and engine.other.pid in children
    assert engine.executor.call("kernels") == [f"fake in process {pid}" for pid in pids]
    engine.run(*((index, [index, 1, 2, 3], 9) for index in range(4)))
    assert engine.streams == {index: reference([index, 1, 2, 3], 9) for index in range(4)}
    assert engine.executor.call_beside("take_reads") == [{}] * 4
    engine.other.send_signal(signal.SIGTERM)  # a pod's end: requests go on, and node 0 decides when it is over
    engine.run((9, [5, 6], 6))
    assert engine.streams[9] == reference([5, 6], 6)
    engine.core.close()
    assert "signal 15: ending with node 0" in engine.ended() and engine.other.returncode == 0
    assert gone(pids)


@pytest.mark.req("DX-24")
@pytest.mark.parametrize(
    "how", mostly_slow(["killed", "stopped", "dies", "disagrees", "node", "node stopped"], ("killed", "node"))
)
def test_a_rank_on_another_node_ends_the_group_by_name(two_nodes, how):
    engine = two_nodes(2)
    pid, pids, began = engine.executor.pids[1], engine.executor.pids, time.monotonic()
    token = {"dies": DYING_TOKEN, "disagrees": OTHER_TOKEN}.get(how, 1)
    if token == 1:
        engine.run((0, [1, 2], 3))
        at = engine.other.pid if how.startswith("node") else pid
        os.kill(at, signal.SIGSTOP if "stopped" in how else signal.SIGKILL)
    rank = rf"rank 1 \(process {pid} on node 1\) "
    told = {
        "killed": rank + "was killed by signal 9",
        "stopped": rank + r"hangs: nothing has moved for 1.5 seconds",
        "dies": rank + "ended with exit status 7",
        "disagrees": r"rank 1 and rank 0 disagree about the tokens of step \d+",
        "node": rank + r"is gone with its node: node 1 \(127.0.0.1\) has closed its connection",
        "node stopped": rank + r"hangs: nothing has moved for 1.5 seconds",
    }[how]
    with pytest.raises(GroupFailed, match=told):
        engine.run((1, [1, token], 30))
    assert time.monotonic() - began < 30
    if how == "node stopped":
        os.kill(engine.other.pid, signal.SIGCONT)
    said = engine.ended()
    assert how.startswith("node") or "GroupFailed: " in said
    deadline = time.monotonic() + 30
    while not gone(pids):  # the ranks of a node that was killed end by themselves
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nodes_that_differ_are_told_in_what(tmp_path):
    config = config_of(2)
    other = headless(msgspec.structs.replace(config, seed=7), tmp_path)
    with pytest.raises(
        ConfigError, match=r"^node 1 \(127\.0\.0\.1\) differs from node 0 in its setting seed: 7 there, 0 on node 0$"
    ):
        Engine(2, config=config)
    _, told = other.communicate(timeout=60)
    assert "ConfigError: node 1 (127.0.0.1) differs from node 0 in its setting seed: 7 there" in told


def test_who_may_join(monkeypatch):
    """Strangers do not disturb; a number that is taken is refused, and may be had again once its node is gone."""
    config = config_of(2)
    parallel, own = msgspec.structs.replace(config.parallel, nnodes=3, tensor_parallel_size=3), fingerprint(config)
    master, found = Master(parallel), list[list[socket.socket]]()
    gathering = threading.Thread(target=lambda: found.append(master.gather(own, 60)))
    gathering.start()

    def come(message: bytes) -> socket.socket:
        link = socket.create_connection((HOST, parallel.master_port), 10)
        link.sendall(message)
        return link

    def greets(node: int) -> socket.socket:
        link = come(b"")
        send_frame(link, node_words.encode(NodeHello(node, own, 1)))
        return link

    strangers = [come(b"GET / HTTP/1.1\r\n\r\n"), come(b"\x00"), come(b"\x05\x00\x00\x00\xc1\xc1\xc1\xc1\xc1"), come(b"")]
    strangers[-1].close()
    first = greets(1)
    while 1 not in master._nodes:
        time.sleep(0.01)
    second = greets(1)
    answer = node_words.decode_answer(receive_frame(second) or b"")
    assert answer == TurnedAway("--node-rank 1 is taken: the node at 127.0.0.1 has it")
    first.close()
    while 1 in master._nodes:
        time.sleep(0.01)
    links = [greets(1), greets(2)]
    gathering.join(60)
    assert len(found[0]) == 2
    joined = master.welcome()
    forged = come(b"")
    send_frame(forged, node_words.encode(WireHello("a guess", 1, 0)))
    assert joined.token not in ("", "a guess")
    for link in (*links, *strangers, second, forged, *found[0]):
        link.close()
    master.close("over")


def test_an_address_or_a_port_that_cannot_be_had_is_refused_by_name():
    parallel = config_of(2).parallel
    with socket.socket() as taken:
        taken.bind((HOST, parallel.master_port))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"^--master-port {parallel.master_port} is in use on 127.0.0.1$"):
            Master(parallel)
    elsewhere = msgspec.structs.replace(parallel, master_addr="203.0.113.7")
    with pytest.raises(ConfigError, match=r"--master-addr 203.0.113.7: no network interface of this machine has the address"):
        Master(elsewhere)
    unknown = msgspec.structs.replace(parallel, master_addr="nowhere.invalid")
    with pytest.raises(ConfigError, match=r"--master-addr nowhere.invalid is no address that is known here"):
        Master(unknown, 0.0)
    with pytest.raises(GroupFailed, match=rf"node 0 at 127.0.0.1:{parallel.master_port} cannot be reached within 0.1 seconds"):
        join(parallel, {}, 0.1)
    master = Master(parallel)
    with pytest.raises(GroupFailed, match=rf"node 1 has not come to 127.0.0.1:{parallel.master_port} within 0 seconds"):
        master.gather({}, 0.0)
