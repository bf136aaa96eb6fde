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
from threading import Event
from typing import Final, NamedTuple, Protocol

from penstock.engine.config import ConfigError, ParallelConfig
from penstock.engine.parallel import node_words
from penstock.engine.parallel.callers import Callers
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.fingerprint import Fingerprint, difference
from penstock.engine.parallel.frames import peer, receive_frame, send_frame
from penstock.engine.parallel.layout import Wire
from penstock.engine.parallel.meeting import Meeting
from penstock.engine.parallel.node_words import MAX_GREETING, Greeting, NodeHello, TurnedAway, Welcome, WireHello

JOIN_S: Final = 600.0
"""Seconds that nodes may take to come: images are pulled and pods are scheduled meanwhile."""
_RETRY_S: Final = 0.5
_REACH_S: Final = 10.0
"""Seconds in which node 0 must take a connection."""
_BACKLOG: Final = 256

log = logging.getLogger(__name__)


class Joined(NamedTuple):
    """A node's connection to node 0, and where wires reach the nodes."""

    link: socket.socket
    listener: socket.socket
    token: str
    addresses: Sequence[tuple[str, int]]
    starts: Sequence[int]
    """The first number that each node has brought; see `Meeting`."""


class Wiring(Protocol):
    """Which wires there are, and where their ends are."""

    def wires(self) -> Sequence[Wire]: ...
    def node(self, rank: int, /) -> int: ...


class _Come(NamedTuple):
    """A node that has come."""

    link: socket.socket
    address: tuple[str, int]
    numbers: range


class Master:
    """Node 0, while others come.

    Args:
        parallel: Says where it listens, and who is to come.
        patience: Seconds for the address to become known.

    Raises:
        ConfigError: The address is not this machine's, or the port is in use.
    """

    def __init__(self, parallel: ParallelConfig, patience: float = JOIN_S) -> None:
        self._meeting, self._timeout = Meeting.of(parallel), parallel.timeout
        self._nodes = dict[int, _Come]()
        """By the first number that each has brought."""
        self._host = _resolved(self._meeting, time.monotonic() + patience)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listener.bind((self._host, self._meeting.port))
            self.listener.listen(_BACKLOG)
        except OSError as error:
            self.listener.close()
            raise ConfigError(_unbound(self._meeting, self._host, error)) from error
        self._poll = select.poll()
        self._callers = Callers(self.listener, self._poll)

    def gather(self, own: Fingerprint, patience: float = JOIN_S, over: Event | None = None) -> list[socket.socket]:
        """Wait for the other nodes; return their connections in the order of nodes.

        Args:
            own: What they are compared with.
            patience: Seconds for them to come.
            over: Set where nobody waits for them any more.

        Raises:
            ConfigError: A node differs from this one; it has been told so.
            GroupFailed: A node has not come.
        """
        deadline, name, place = time.monotonic() + patience, self._meeting.name, f"{self._host}:{self._meeting.port}"
        log.info("waiting for %ss %s at %s", name, ", ".join(map(str, self._missing())), place)
        try:
            while missing := self._missing():
                if over is not None and over.is_set():
                    raise GroupFailed("the engine has been closed")
                if time.monotonic() > deadline:
                    raise GroupFailed(f"{name} {missing[0]} has not come to {place} within {patience:g} seconds")
                for fd, _ in self._poll.poll(100):
                    self._hear(fd, own)
                self._callers.forget()
        except (ConfigError, GroupFailed) as error:
            self.close(str(error))
            raise
        self._callers.close()
        links = [self._nodes[node].link for node in sorted(self._nodes)]
        for link in links:
            keep_alive(link, self._timeout)
            link.setblocking(True)
        return links

    def welcome(self) -> Joined:
        """Tell all nodes where the others are. Raises `GroupFailed` where one has gone again."""
        starts = sorted(self._nodes)
        addresses = [(self._host, self._meeting.port)] + [self._nodes[node].address for node in starts]
        token, starts = secrets.token_hex(16), [0, *starts]
        for first, come in self._nodes.items():
            try:
                send_frame(come.link, node_words.encode(Welcome(token, addresses, starts)))
            except OSError as error:
                self.close(gone := f"{self._meeting.name} {first} ({come.address[0]}) has gone before all nodes had met: {error}")
                raise GroupFailed(gone) from error
        return Joined(self.listener, self.listener, token, addresses, starts)

    def close(self, why: str) -> None:
        """Turn all nodes away."""
        for link in (*(come.link for come in self._nodes.values()), *self._callers.links()):
            with suppress(OSError):
                send_frame(link, node_words.encode(TurnedAway(why)))
            link.close()
        self.listener.close()

    def _hear(self, fd: int, own: Fingerprint) -> None:
        if fd not in self._callers:
            gone = next(node for node, come in self._nodes.items() if come.link.fileno() == fd)
            log.warning("%s %d has gone again", self._meeting.name, gone)
            self._poll.unregister(fd)
            self._nodes.pop(gone).link.close()
        elif (said := self._callers.hear(fd)) is not None:
            link, hello = said
            if isinstance(hello, NodeHello):
                self._take(link, hello, own)
            else:
                log.warning("a connection from %s is a wire's, before all nodes have come", peer(link))
                link.close()

    def _take(self, link: socket.socket, hello: NodeHello, own: Fingerprint) -> None:
        """A node has said which one it is."""
        host, meeting, numbers = peer(link), self._meeting, range(hello.node, hello.node + hello.count)
        known = range(numbers.start, min(numbers.stop, meeting.size))
        if (taken := next((number for number in known if self._has(number) is not None), None)) is not None:
            message = f"{meeting.taken} {taken} is taken: the node at {self._has(taken)} has it"
            log.warning("the node at %s is turned away: %s", host, message)
            with suppress(OSError):
                send_frame(link, node_words.encode(TurnedAway(message)))
            link.close()
            return
        self._nodes[hello.node] = _Come(link, (host, hello.port), numbers)
        self._poll.register(link, select.POLLIN)
        if (told := difference(own, hello.fingerprint, f"{meeting.name} {hello.node} ({host})", f"{meeting.name} 0")) is not None:
            raise ConfigError(told)
        if not numbers or numbers.stop > meeting.size:
            raise ConfigError(f"{meeting.taken} {numbers.stop - 1} has come from {host}; {meeting.size_flag} is {meeting.size}")
        log.info("%s %d has come from %s", meeting.name, hello.node, host)

    def _has(self, number: int) -> str | None:
        """The address of the node that has a number; None: nobody has it."""
        if number < self._meeting.first:
            return self._host
        return next((come.address[0] for come in self._nodes.values() if number in come.numbers), None)

    def _missing(self) -> list[int]:
        return self._meeting.missing([come.numbers for come in self._nodes.values()])


def join(parallel: ParallelConfig, own: Fingerprint, patience: float = JOIN_S) -> Joined:
    """Connect a node to node 0, and wait until all nodes have come.

    Raises:
        ConfigError: Node 0 has turned it away, and says why; or something else answers in its place.
        GroupFailed: Node 0 cannot be reached.
    """
    meeting, deadline = Meeting.of(parallel), time.monotonic() + patience
    place = meeting.host, meeting.port
    problem: object = None
    while time.monotonic() < deadline:
        try:
            link = socket.create_connection(place, timeout=_REACH_S)
        except OSError as error:
            if problem is None:
                log.info("node 0 at %s:%d cannot be reached yet: %s", *place, error)
            problem = error
            time.sleep(_RETRY_S)
            continue
        keep_alive(link, parallel.timeout)
        try:
            if (joined := _greet(link, meeting, own)) is not None:
                return joined
            problem = "it has ended before all nodes had come"
        except OSError as error:
            problem = error
        link.close()
        time.sleep(_RETRY_S)
    raise GroupFailed(f"node 0 at {place[0]}:{place[1]} cannot be reached within {patience:g} seconds: {problem}")


def _greet(link: socket.socket, meeting: Meeting, own: Fingerprint) -> Joined | None:
    """Wait for the answer; None: node 0 is gone."""
    link.settimeout(None)
    numbers, listener = meeting.own, socket.socket(link.family, socket.SOCK_STREAM)
    try:
        # Where node 0 is reached from, the other nodes reach this one.
        listener.bind((link.getsockname()[0], 0))
        listener.listen(_BACKLOG)
        send_frame(link, node_words.encode(NodeHello(numbers.start, dict(own), listener.getsockname()[1], len(numbers))))
        frame = receive_frame(link, MAX_GREETING)
        answer = None if frame is None else node_words.decode_answer(frame)
    except OSError:
        listener.close()
        raise
    except ValueError as error:
        flags = f"{meeting.host_flag} {meeting.host} {meeting.port_flag} {meeting.port}"
        answer = TurnedAway(f"{flags}: what answers there is no node of Penstock: {error}")
    if isinstance(answer, Welcome):
        return Joined(link, listener, answer.token, answer.addresses, answer.starts)
    listener.close()
    if answer is not None:
        link.close()
        raise ConfigError(answer.message)
    return None


def connect(wiring: Wiring, node: int, joined: Joined, timeout: float) -> dict[Wire, socket.socket]:
    """Make the wires that begin or end at a node. The listener is closed.

    Raises:
        GroupFailed: Another node has not connected, or cannot be reached.
    """
    wires = wiring.wires()
    found, missing = dict[Wire, socket.socket](), {wire for wire in wires if wiring.node(wire.receiver) == node}
    try:
        for wire in wires:
            if wiring.node(wire.sender) == node:
                found[wire] = _to(joined.addresses[wiring.node(wire.receiver)], WireHello(joined.token, *wire), timeout)
        _await(missing, joined, time.monotonic() + timeout, found)
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


def _await(missing: set[Wire], joined: Joined, deadline: float, found: dict[Wire, socket.socket]) -> None:
    """Take in the wires that others make. Raises `TimeoutError` where one does not come."""
    poll = select.poll()
    callers = Callers(joined.listener, poll)
    try:
        while missing:
            if time.monotonic() > deadline:
                raise TimeoutError("a connection has not come")
            for fd, _ in poll.poll(100):
                if (said := callers.hear(fd)) is None:
                    continue
                stream, hello = said
                wire = _wire(hello, joined.token)
                if wire is not None and wire in missing:
                    missing.remove(wire)
                    found[wire] = stream
                else:
                    log.warning("a connection from %s is no wire of this engine", peer(stream))
                    stream.close()
            callers.forget()
    finally:
        callers.close()


def _wire(hello: Greeting, token: str) -> Wire | None:
    """What a connection says it is; None: nothing that we expect."""
    if not isinstance(hello, WireHello) or not hmac.compare_digest(hello.token.encode(), token.encode()):
        return None
    return Wire(hello.sender, hello.receiver, hello.kind)


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


def _resolved(meeting: Meeting, deadline: float) -> str:
    """The IP address of node 0. A pod's name is known some time after it has started."""
    while True:
        try:
            return str(socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                flag = f"{meeting.host_flag} {meeting.host}"
                raise ConfigError(f"{flag} is no address that is known here: {error.strerror}") from error
            time.sleep(_RETRY_S)


def _unbound(meeting: Meeting, host: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{meeting.port_flag} {meeting.port} is in use on {host}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{meeting.host_flag} {meeting.host}: no network interface of this machine has the address {host}"
    return f"{meeting.host_flag} {host} {meeting.port_flag} {meeting.port}: {os.strerror(error.errno or 0)}"
