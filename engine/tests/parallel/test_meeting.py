"""Where nodes meet: what strangers, nodes that go again and other servers do to it."""

import asyncio
import errno
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from harness import make_config
from test_nodes import HOST, free_port

from penstock.engine.config import ConfigError, ParallelConfig
from penstock.engine.core.ipc.far_cores import FarCores
from penstock.engine.core.ipc.forward import Forward
from penstock.engine.core.ipc.stand_in import StandIn
from penstock.engine.core.wave import Wave, Waves
from penstock.engine.messages import CoreFailed, CoreInput, CoreOutput, CoreStart
from penstock.engine.parallel import node_words
from penstock.engine.parallel.callers import Callers
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.frames import FirstFrame, FrameReader, receive_frame, send_frame
from penstock.engine.parallel.layout import Layout, Wire
from penstock.engine.parallel.node_words import Close, NodeHello, WireHello
from penstock.engine.parallel.remote_node import RemoteNode
from penstock.engine.parallel.rendezvous import Master, connect, join


def cores(start: int = 0, size: int = 2, port: int = 0) -> ParallelConfig:
    return ParallelConfig(
        data_parallel_size=size,
        data_parallel_size_local=1,
        data_parallel_start_rank=start,
        data_parallel_address=HOST,
        data_parallel_rpc_port=port or free_port(),
    )


def come(parallel: ParallelConfig, said: bytes = b"") -> socket.socket:
    link = socket.create_connection((HOST, parallel.data_parallel_rpc_port), 60)
    link.sendall(said)
    return link


def greets(parallel: ParallelConfig, rank: int, port: int = 1) -> socket.socket:
    link = come(parallel)
    send_frame(link, node_words.encode(NodeHello(rank, {}, port)))
    return link


def reset(link: socket.socket) -> None:
    """Closes it as the end of a process does that has not read everything."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def met(parallel: ParallelConfig) -> tuple[Master, list[socket.socket]]:
    """All nodes have come."""
    master = Master(parallel)
    nodes = [greets(parallel, rank) for rank in range(1, parallel.data_parallel_size)]
    master.gather({}, 60)
    return master, nodes


def test_a_node_that_greets_and_is_gone_before_it_is_heard_may_come_again():
    parallel = cores()
    master = Master(parallel)
    reset(greets(parallel, 1))
    second = greets(parallel, 1)
    [link] = master.gather({}, 60)
    for each in (link, second, master.listener):
        each.close()


def test_a_node_that_goes_before_it_is_welcomed_is_named():
    master, [first, second] = met(cores(size=3))
    reset(second)
    with pytest.raises(GroupFailed, match=rf"^data-parallel rank 2 \({HOST}\) has gone before all nodes had met: "):
        master.welcome()
    first.close()


def test_of_callers_that_say_nothing_the_oldest_go_and_a_node_is_still_heard():
    parallel, poll = cores(), select.poll()
    listener = socket.create_server((HOST, parallel.data_parallel_rpc_port), backlog=512)
    callers, strangers = Callers(listener, poll), [come(parallel) for _ in range(300)]
    node, said = greets(parallel, 1), None
    while said is None:
        for fd, _ in poll.poll(60_000):
            said = callers.hear(fd) or said
        callers.forget()
        assert len(callers.links()) <= 128
    assert said[1] == NodeHello(1, {}, 1)
    assert strangers[0].recv(1) == b""
    callers.close()
    assert strangers[-1].recv(1) == b""
    for each in (*strangers, node, said[0], listener):
        each.close()


def test_wires_come_through_strangers_that_say_nothing_or_guess():
    """Nor is anything lost of what a wire says behind its greeting."""
    master, [node] = met(cores())
    joined = master.welcome()
    place = joined.listener.getsockname()
    strangers = [socket.create_connection(place) for _ in range(8)]
    guesses = [WireHello("gu\u00e9ss", 1, 0), WireHello(joined.token, 7, 0), NodeHello(1, {}, 1)]
    for guess in guesses:
        strangers.append(socket.create_connection(place))
        send_frame(strangers[-1], node_words.encode(guess))
    wire = socket.create_connection(place)
    greeting = node_words.encode(WireHello(joined.token, 1, 0))
    wire.sendall(len(greeting).to_bytes(4, "little") + greeting + b"and more")
    with socket.create_server((HOST, 0)) as other:
        at_other = joined._replace(addresses=[place, other.getsockname()])
        found = connect(Layout(2, 1, 2), 0, at_other, 30.0)
        assert found.keys() == {Wire(0, 1), Wire(1, 0)} and found[Wire(1, 0)].recv(99) == b"and more"
    for each in (*strangers, wire, node, *found.values()):
        each.close()


def test_another_server_in_the_place_of_node_0_is_refused_by_its_flags():
    parallel = cores(1)
    with socket.create_server((HOST, parallel.data_parallel_rpc_port)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.recv(1 << 16)
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                with suppress(ConnectionError):  # the node has read no more
                    link.recv(1)

        answering = threading.Thread(target=answer)
        answering.start()
        flags = f"--data-parallel-address {HOST} --data-parallel-rpc-port {parallel.data_parallel_rpc_port}"
        with pytest.raises(ConfigError, match=f"^{flags}: what answers there is no node of Penstock: a message of 1,347,703,880"):
            join(parallel, {}, 60)
        answering.join(60)


class Unreachable(socket.socket):
    """What the kernel says of a machine of this network that is gone."""

    def recv(self, *_: int) -> bytes:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    send = recv


def test_a_machine_that_is_gone_ends_what_it_says():
    with Unreachable() as stream:
        reader, first = FrameReader(stream), FirstFrame(stream, 9)
        assert reader.read() == [] and reader.ended
        assert first.read() is None and first.ended


def test_a_core_on_a_machine_that_is_gone_makes_no_steps_and_stops_none(monkeypatch):
    """The step in which others wait for it tells them."""
    waves, (here, there) = Waves(2), pair()
    wave = Wave(waves.end([(1, here.detach())]), 0)
    there.send(b"\1")
    while not wave.is_behind:
        pass
    far = wave._far[0].connection.detach()
    wave._far[0].connection = Unreachable(fileno=far)
    wave.silence()
    wave.begin()
    assert not wave.is_behind
    for each in (there, wave._far[0].connection, waves):
        each.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server((HOST, 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def test_a_node_that_is_gone_before_it_is_asked_for_its_address_is_buried():
    here, there = pair()
    reset(there)
    node = RemoteNode(Layout(2, 1, 2), 1, here)
    assert "is gone with its node" in node.hear(here.fileno())[0].how
    node.close()


def test_a_stand_in_of_a_core_that_is_gone_already_says_so():
    here, there = pair()
    reset(there)
    start = CoreStart(config=make_config(), engine_index=1, address=None, events_addresses=[], replay_addresses=[], runner=None)
    port = Told()
    StandIn(start, port, here).run()
    assert port.told == [CoreFailed("data-parallel rank 1 (somewhere) is gone; the log of its node says why")]
    here.close()


def test_a_forward_that_has_no_file_for_a_connection_takes_the_next(monkeypatch):
    forward, usual, failures = Forward([f"tcp://{HOST}:*"], "--events-port"), socket.socket.accept, [1]

    def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures and listener.getsockname()[1] == forward.port:
            failures.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return usual(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with socket.create_server((HOST, 0)) as target:
        forward.open(target.getsockname())
        with socket.create_connection((HOST, forward.port), 60) as client, target.accept()[0] as there:
            there.sendall(b"a batch")
            assert client.recv(99) == b"a batch" and not failures


class Told:
    """A port where nobody asks for anything."""

    def __init__(self) -> None:
        self.told = list[CoreOutput]()
        self.send = self.told.append

    def watch(self, socket: object) -> None: ...

    def poll(self, patience_ms: int) -> bool:
        return True

    def receive(self) -> Iterator[CoreInput]:
        return iter(())


async def test_whatever_stops_the_nodes_from_meeting_is_told_to_the_start(monkeypatch):
    def breaks(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Master, "gather", breaks)
    far = FarCores(msgspec.structs.replace(make_config(), parallel=cores()))
    with pytest.raises(OSError, match="Too many open files"):
        await asyncio.wait_for(far.streams(), 60)


async def test_nodes_that_come_while_the_engine_is_closed_are_sent_away_in_good_order(monkeypatch):
    far, (link, node) = FarCores(msgspec.structs.replace(make_config(), parallel=cores())), pair()
    core, there = pair()
    come = threading.Event()
    monkeypatch.setattr(far, "_gathered", lambda: ([link], {1: core}) if come.wait(60) else None)
    asked, before = asyncio.create_task(far.streams()), set(threading.enumerate())
    await asyncio.sleep(0)
    [meeting] = set(threading.enumerate()) - before
    come.set()
    meeting.join()  # what it has to say waits for this loop
    far.close()
    with pytest.raises(GroupFailed, match="has been closed"):
        await asked
    node.settimeout(60)
    assert node_words.decode_task(receive_frame(node) or b"") == Close()
    assert node.recv(1) == there.recv(1) == b""
    for each in (node, there):
        each.close()
