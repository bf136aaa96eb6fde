"""The ranks of another node, as the core sees them: over one connection to that node's process."""

import socket
from contextlib import suppress

from penstock.engine.parallel import node_words
from penstock.engine.parallel.frames import FrameReader, peer, send_frame
from penstock.engine.parallel.layout import Layout
from penstock.engine.parallel.node_words import BesideOrder, Close, Ended, Marks, Order, Report, ShowStack
from penstock.engine.parallel.shared_memory import RankProgress


class RemoteNode:
    """See LocalNode, which its process has.

    Args:
        layout: Of the engine.
        node: Its number.
        link: To its process.
    """

    def __init__(self, layout: Layout, node: int, link: socket.socket) -> None:
        self._ranks, self._node, self._link = layout.on_node(node), node, link
        self._host = peer(link)
        self._reader = FrameReader(link)
        self._progress = [RankProgress(0, 0, 0.0)] * len(self._ranks)

    def filenos(self) -> list[int]:
        """Where something may be heard."""
        return [self._link.fileno()]

    def hear(self, fd: int) -> list[Report]:
        """Take in what the node says, or that it is gone."""
        assert fd == self._link.fileno()
        heard = [node_words.decode_report(frame) for frame in self._reader.read()]
        for report in heard:
            if isinstance(report, Marks):
                self._progress = report.progress
        if self._reader.ended:
            heard.append(self.buried())
        return heard

    def progress(self) -> list[RankProgress]:
        """How far the ranks had come when the node last said so."""
        return self._progress

    def send(self, order: bytes) -> None:
        """For all ranks. Raises `OSError` where the node is gone."""
        self._tell(Order(order))

    def send_beside(self, order: bytes) -> None:
        """The same, of a call that is safe beside a step."""
        self._tell(BesideOrder(order))

    def buried(self) -> Ended:
        """The connection is broken."""
        return Ended(self._ranks.start, f"is gone with its node: node {self._node} ({self._host}) has closed its connection")

    def show_stack(self, rank: int) -> None:
        """Have a rank that hangs write the stacks of its threads to its node's log."""
        with suppress(OSError):
            self._tell(ShowStack(rank))

    def end(self, cause: int) -> None:
        """End the node's processes at once: they follow the connection."""
        self._link.close()

    def close(self) -> None:
        """End them in good order; safe to call twice."""
        if self._link.fileno() >= 0:
            with suppress(OSError):
                self._tell(Close())
            self._link.close()

    def _tell(self, task: node_words.Task) -> None:
        send_frame(self._link, node_words.encode(task))
