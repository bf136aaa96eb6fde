"""How the nodes of an engine find each other: every node connects to node 0, which compares them and tells each where the
others are; then those nodes connect whose ranks exchange something."""

import errno
import hmac
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from penstock.engine.config import ConfigError, ParallelConfig
from penstock.engine.parallel import node_words
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.fingerprint import Fingerprint, difference
from penstock.engine.parallel.frames import FrameReader, receive_frame, send_frame
from penstock.engine.parallel.layout import Layout, Wire
from penstock.engine.parallel.node_words import MAX_GREETING, NodeHello, TurnedAway, Welcome, WireHello

JOIN_S: Final = 600.0
"""Seconds that nodes may take to come: images are pulled and pods are scheduled meanwhile."""
_RETRY_S: Final = 0.5
_GREETING_S: Final = 10.0
"""Seconds in which a connection must say what it is."""
_BACKLOG: Final = 256

log = logging.getLogger(__name__)


class Joined(NamedTuple):
    """A node's connection to node 0, and where wires reach the nodes."""

    link: socket.socket
    listener: socket.socket
    token: str
    addresses: Sequence[tuple[str, int]]


class Master:
    """Node 0, while others come.

    Args:
        parallel: Its `master_addr` and `master_port` are listened on.
        patience: Seconds for the address to become known.

    Raises:
        ConfigError: The address is not this machine's, or the port is in use.
    """

    def __init__(self, parallel: ParallelConfig, patience: float = JOIN_S) -> None:
        self._parallel, self._nodes = parallel, dict[int, tuple[socket.socket, tuple[str, int]]]()
        self._host = _resolved(parallel, time.monotonic() + patience)
        self._new = dict[int, tuple[socket.socket, FrameReader, float]]()
        """Connections that have not said what they are: by file descriptor, each with the time when that is too late."""
        self._poll = select.poll()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listener.bind((self._host, parallel.master_port))
            self.listener.listen(_BACKLOG)
        except OSError as error:
            self.listener.close()
            raise ConfigError(_unbound(parallel, self._host, error)) from error
        self._poll.register(self.listener, select.POLLIN)

    def gather(self, own: Fingerprint, patience: float = JOIN_S) -> list[socket.socket]:
        """Wait for the other nodes; return their connections in the order of nodes.

        Raises:
            ConfigError: A node differs from this one; it has been told so.
            GroupFailed: A node has not come.
        """
        deadline, wanted = time.monotonic() + patience, self._parallel.nnodes
        log.info("waiting for %d nodes at %s:%d", wanted - 1, self._host, self._parallel.master_port)
        try:
            while len(self._nodes) < wanted - 1:
                if time.monotonic() > deadline:
                    missing = next(node for node in range(1, wanted) if node not in self._nodes)
                    place = f"{self._host}:{self._parallel.master_port}"
                    raise GroupFailed(f"node {missing} has not come to {place} within {patience:g} seconds")
                for fd, _ in self._poll.poll(100):
                    self._hear(fd, own)
                self._forget()
        except (ConfigError, GroupFailed) as error:
            self.close(str(error))
            raise
        for stranger, _, _ in self._new.values():
            stranger.close()
        links = [self._nodes[node][0] for node in range(1, wanted)]
        for link in links:
            keep_alive(link, self._parallel.timeout)
            link.setblocking(True)
        return links

    def welcome(self) -> Joined:
        """Tell all nodes where the others are."""
        addresses = [(self._host, self._parallel.master_port)] + [self._nodes[node][1] for node in sorted(self._nodes)]
        token = secrets.token_hex(16)
        for link, _ in self._nodes.values():
            send_frame(link, node_words.encode(Welcome(token, addresses)))
        return Joined(self.listener, self.listener, token, addresses)

    def close(self, why: str) -> None:
        """Turn all nodes away."""
        for link, *_ in (*self._nodes.values(), *self._new.values()):
            with suppress(OSError):
                send_frame(link, node_words.encode(TurnedAway(why)))
            link.close()
        self.listener.close()

    def _hear(self, fd: int, own: Fingerprint) -> None:
        if fd == self.listener.fileno():
            link, _ = self.listener.accept()
            link.setblocking(False)
            self._new[link.fileno()] = (link, FrameReader(link, MAX_GREETING), time.monotonic() + _GREETING_S)
            self._poll.register(link, select.POLLIN)
            return
        if (gone := next((node for node, (link, _) in self._nodes.items() if link.fileno() == fd), None)) is not None:
            log.warning("node %d has gone again", gone)
            self._poll.unregister(fd)
            self._nodes.pop(gone)[0].close()
            return
        link, reader, _ = self._new[fd]
        try:
            frames = reader.read()
            if not frames and not reader.ended:
                return
            hello = node_words.decode_greeting(frames[0])
            if not isinstance(hello, NodeHello):
                raise ValueError("a wire, before all nodes have come")
        except (ValueError, IndexError, OSError) as error:
            log.warning("a connection from %s is no node's: %s", _peer(link), error or "it was closed")
            self._drop(fd)
            return
        del self._new[fd]
        self._take(link, hello, own)

    def _take(self, link: socket.socket, hello: NodeHello, own: Fingerprint) -> None:
        """A node has said which one it is."""
        host = link.getpeername()[0]
        if hello.node in self._nodes:
            other = self._nodes[hello.node][1][0]
            message = f"--node-rank {hello.node} is taken: the node at {other} has it"
            log.warning("the node at %s is turned away: %s", host, message)
            self._poll.unregister(link)
            with suppress(OSError):
                send_frame(link, node_words.encode(TurnedAway(message)))
            link.close()
            return
        self._nodes[hello.node] = (link, (host, hello.port))
        if (told := difference(own, hello.fingerprint, f"node {hello.node} ({host})", "node 0")) is not None:
            raise ConfigError(told)
        if not 0 < hello.node < self._parallel.nnodes:
            raise ConfigError(f"--node-rank {hello.node} has come from {host}; --nnodes is {self._parallel.nnodes}")
        log.info("node %d has come from %s", hello.node, host)

    def _forget(self) -> None:
        """Drop connections that say nothing."""
        for fd in [fd for fd, (_, _, limit) in self._new.items() if time.monotonic() > limit]:
            log.warning("a connection from %s said nothing for %g seconds", _peer(self._new[fd][0]), _GREETING_S)
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._new.pop(fd)[0].close()


def join(parallel: ParallelConfig, own: Fingerprint, patience: float = JOIN_S) -> Joined:
    """Connect a node to node 0, and wait until all nodes have come.

    Raises:
        ConfigError: Node 0 has turned it away, and says why.
        GroupFailed: Node 0 cannot be reached.
    """
    place, deadline = (parallel.master_addr or "", parallel.master_port), time.monotonic() + patience
    problem: object = None
    while time.monotonic() < deadline:
        try:
            link = socket.create_connection(place, timeout=_GREETING_S)
        except OSError as error:
            if problem is None:
                log.info("node 0 at %s:%d cannot be reached yet: %s", *place, error)
            problem = error
            time.sleep(_RETRY_S)
            continue
        keep_alive(link, parallel.timeout)
        try:
            if (joined := _greet(link, parallel.node_rank, own)) is not None:
                return joined
            problem = "it has ended before all nodes had come"
        except OSError as error:
            problem = error
        link.close()
        time.sleep(_RETRY_S)
    raise GroupFailed(f"node 0 at {place[0]}:{place[1]} cannot be reached within {patience:g} seconds: {problem}")


def _greet(link: socket.socket, node: int, own: Fingerprint) -> Joined | None:
    """Wait for the answer; None: node 0 is gone."""
    link.settimeout(None)
    listener = socket.socket(link.family, socket.SOCK_STREAM)
    # Where node 0 is reached from, the other nodes reach this one.
    listener.bind((link.getsockname()[0], 0))
    listener.listen(_BACKLOG)
    send_frame(link, node_words.encode(NodeHello(node, dict(own), listener.getsockname()[1])))
    frame = receive_frame(link)
    answer = None if frame is None else node_words.decode_answer(frame)
    if isinstance(answer, Welcome):
        return Joined(link, listener, answer.token, answer.addresses)
    listener.close()
    if answer is not None:
        link.close()
        raise ConfigError(answer.message)
    return None


def connect(layout: Layout, node: int, joined: Joined, timeout: float) -> dict[Wire, socket.socket]:
    """Make the wires that begin or end at a node. The listener is closed.

    Raises:
        GroupFailed: Another node has not connected, or cannot be reached.
    """
    wires, ours = layout.wires(), layout.on_node(node)
    found, missing = dict[Wire, socket.socket](), {wire for wire in wires if wire.receiver in ours}
    try:
        for wire in wires:
            if wire.sender in ours:
                found[wire] = _to(joined.addresses[layout.node(wire.receiver)], WireHello(joined.token, *wire), timeout)
        deadline = time.monotonic() + timeout
        while missing:
            joined.listener.settimeout(max(deadline - time.monotonic(), 0.001))
            stream, _ = joined.listener.accept()
            wire = _wire(stream, joined.token)
            if wire is None or wire not in missing:
                log.warning("a connection from %s is no wire of this engine", _peer(stream))
                stream.close()
                continue
            missing.remove(wire)
            found[wire] = stream
    except OSError as error:
        for stream in found.values():
            stream.close()
        raise GroupFailed(f"node {node} could not be connected with the others: {error}") from error
    finally:
        joined.listener.close()
    for stream in found.values():
        stream.settimeout(None)
        keep_alive(stream, timeout)
    return found


def _to(address: tuple[str, int], hello: WireHello, timeout: float) -> socket.socket:
    stream = socket.create_connection(address, timeout=timeout)
    send_frame(stream, node_words.encode(hello))
    return stream


def _wire(stream: socket.socket, token: str) -> Wire | None:
    """What a connection says it is; None: nothing that we expect."""
    stream.settimeout(_GREETING_S)
    try:
        frame = receive_frame(stream, MAX_GREETING)
        hello = None if frame is None else node_words.decode_greeting(frame)
    except (OSError, ValueError):
        return None
    if not isinstance(hello, WireHello) or not hmac.compare_digest(hello.token, token):
        return None
    return Wire(hello.sender, hello.receiver)


def keep_alive(stream: socket.socket, timeout: float) -> None:
    """Small messages go at once, and a machine at the other end that is gone is noticed within so many seconds."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(round(timeout / 4), 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, seconds),
        (socket.TCP_KEEPINTVL, seconds),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, round(1000 * timeout)),
    ):
        stream.setsockopt(socket.IPPROTO_TCP, option, value)


def _resolved(parallel: ParallelConfig, deadline: float) -> str:
    """The IP address of node 0. A pod's name is known some time after it has started."""
    host = parallel.master_addr or ""
    while True:
        try:
            return str(socket.getaddrinfo(host, parallel.master_port, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"--master-addr {host} is no address that is known here: {error.strerror}") from error
            time.sleep(_RETRY_S)


def _unbound(parallel: ParallelConfig, host: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--master-port {parallel.master_port} is in use on {host}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--master-addr {parallel.master_addr}: no network interface of this machine has the address {host}"
    return f"--master-addr {host} --master-port {parallel.master_port}: {os.strerror(error.errno or 0)}"


def _peer(stream: socket.socket) -> str:
    try:
        return str(stream.getpeername()[0])
    except OSError:
        return "somewhere"
