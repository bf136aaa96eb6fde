"""A node without the core and without HTTP: it starts its ranks, hands them what node 0 says, and tells node 0 what they say."""

import logging
import select
import signal
import sys
import time
from types import FrameType
from typing import Final, NoReturn

from penstock.engine.config import EngineConfig
from penstock.engine.core.executor import RUNNERS
from penstock.engine.core.ipc.cores_node import CoresNode
from penstock.engine.core.memory import check_weights_fit, measure_memory, stored_bytes
from penstock.engine.kv_events_config import KVEventsConfig
from penstock.engine.parallel import node_words
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.fingerprint import fingerprint
from penstock.engine.parallel.frames import FrameReader, send_frame
from penstock.engine.parallel.layout import Layout
from penstock.engine.parallel.local_node import LocalNode
from penstock.engine.parallel.node_words import BesideOrder, Close, Ended, Marks, Order, Report, ShowStack
from penstock.engine.parallel.rendezvous import connect, join

_MARKS_S: Final = 0.1
"""Between two reports of how far the ranks have come."""
_LINGER_S: Final = 5.0
"""Seconds in which node 0 says what has happened, when a rank here has ended."""

log = logging.getLogger(__name__)


class HeadlessNode:
    """One node, from joining the others to the end of the engine.

    Args:
        config: Of the engine; its `parallel` says which node this is.
        runner: `module:Class` of the model runner.

    Raises:
        ConfigError: Node 0 has turned it away.
        GroupFailed: The nodes have not found each other.
    """

    def __init__(self, config: EngineConfig, runner: str) -> None:
        parallel, layout = config.parallel, Layout.of(config.parallel)
        joined = join(parallel, fingerprint(config))
        self._link, self._reader = joined.link, FrameReader(joined.link)
        wires = connect(layout, parallel.node_rank, joined, parallel.timeout)
        self._poll, self._told, self._next = select.poll(), list[object](), 0.0
        self._node = LocalNode(config, runner, parallel.node_rank, wires, self._relay)
        self._poll.register(self._link, select.POLLIN)
        for fd in self._node.filenos():
            self._poll.register(fd, select.POLLIN)
        self._ending = False
        self._tell(self._node.started)

    def run(self) -> None:
        """Serve until node 0 ends the engine in good order; raises `GroupFailed` where it ends otherwise."""
        try:
            while not self._ending:
                self._turn(round(1000 * _MARKS_S))
        except OSError as error:
            raise GroupFailed(f"node 0 is gone: {error}") from error
        finally:
            self._link.close()
            self._node.close() if self._ending else self._node.close(0.0)

    def _turn(self, patience_ms: int) -> None:
        """Hands on what has come, in either direction."""
        for fd, _ in self._poll.poll(patience_ms):
            if fd == self._link.fileno():
                self._obey()
            else:
                self._pass_on(fd)
        if (now := time.monotonic()) >= self._next:
            self._next, progress = now + _MARKS_S, self._node.progress()
            if progress != self._told:
                self._told = list[object](progress)
                self._tell(Marks(progress))

    def _obey(self) -> None:
        for frame in self._reader.read():
            match node_words.decode_task(frame):
                case Order(data):
                    self._deliver(data, beside=False)
                case BesideOrder(data):
                    self._deliver(data, beside=True)
                case ShowStack(rank):
                    self._node.show_stack(rank)
                case Close():
                    self._ending = True
        if self._reader.ended and not self._ending:
            raise GroupFailed("node 0 is gone, or has ended the engine; its log says why")

    def _deliver(self, data: bytes, *, beside: bool) -> None:
        try:
            self._node.send_beside(data) if beside else self._node.send(data)
        except OSError:
            self._mourn(self._node.buried())

    def _pass_on(self, fd: int) -> None:
        for report in self._node.hear(fd):
            if isinstance(report, Ended):
                self._mourn(report)
            self._tell(report)

    def _mourn(self, ended: Ended) -> NoReturn:
        """A rank here has ended: node 0 is told, and ends the engine."""
        self._tell(ended)
        self._link.settimeout(_LINGER_S)
        raise GroupFailed(f"rank {ended.rank} {ended.how}")

    def _relay(self) -> None:
        """While an order waits for room: the ranks may wait for somebody who hears them."""
        for fd in self._node.filenos():
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if poll.poll(0):
                self._pass_on(fd)

    def _tell(self, report: Report) -> None:
        send_frame(self._link, node_words.encode(report))


def serve(config: EngineConfig, runner: str | None = None, kv_events: KVEventsConfig | None = None) -> int:
    """Run one node of an engine until its end, with ranks of its core or with cores; return the exit status.

    Args:
        config: Of the engine; its `parallel` says which node this is.
        runner: `module:Class` of the model runner; None: the device's.
        kv_events: Where cores publish KV events in vLLM's form; None: nowhere.

    SIGTERM comes to all nodes at once, and node 0 lets running requests finish: this one waits for it. A second one, or SIGINT,
    ends it.

    Raises:
        ConfigError: Node 0 has turned this node away.
        GroupFailed: The nodes have not found each other, or the engine has failed.
    """

    def leave(*_: object) -> NoReturn:
        sys.exit(0)

    def wait(number: int, _: FrameType | None) -> None:
        log.info("signal %d: ending with node 0", number)
        signal.signal(signal.SIGTERM, leave)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    node = CoresNode(config, runner, kv_events) if config.parallel.cores_span_nodes else _with_ranks(config, runner)
    signal.signal(signal.SIGTERM, wait)
    node.run()
    return 0


def _with_ranks(config: EngineConfig, runner: str | None) -> HeadlessNode:
    """A node with ranks of the core on node 0."""
    if config.device == "cpu":
        check_weights_fit(config.model, stored_bytes(config.model.path), measure_memory(), config.parallel.nnodes)
    node = HeadlessNode(config, runner or RUNNERS[config.device])
    log.info("node %d runs %d ranks", config.parallel.node_rank, Layout.of(config.parallel).per_node)
    return node
