"""The cores of a replica that are on other nodes, as the node with the frontend sees them. Light to import: no torch."""

import asyncio
import socket
import threading
from contextlib import suppress

from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.parallel import node_words
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.fingerprint import fingerprint
from penstock.engine.parallel.frames import send_frame
from penstock.engine.parallel.layout import CoreLayout, Wire
from penstock.engine.parallel.node_words import Close
from penstock.engine.parallel.rendezvous import JOIN_S, Master, connect

_Met = tuple[list[socket.socket], dict[Wire, socket.socket]]
"""A connection to each other node, and the wires."""


class FarCores:
    """Waits for the other nodes as soon as one of their cores is asked for.

    Args:
        config: Of the replica.
        patience: Seconds for the nodes to come.
    """

    def __init__(self, config: EngineConfig, patience: float = JOIN_S) -> None:
        self._config, self._patience = config, patience
        self._meeting: asyncio.Future[_Met] | None = None
        self._over = threading.Event()
        self._failed = False

    async def stream(self, core: int) -> socket.socket:
        """The connection to a core, once all nodes have come; to be closed by the caller.

        Raises:
            ConfigError: A node differs from this one, or this one cannot be reached as it was asked to.
            GroupFailed: A node has not come.
        """
        if self._meeting is None:
            self._meeting = asyncio.get_running_loop().create_future()
            # Not a task's thread, for which the end of the process would wait.
            threading.Thread(target=self._meet, args=[self._meeting], name="meeting", daemon=True).start()
        _, wires = await asyncio.shield(self._meeting)
        return wires.pop(Wire(0, core, "core"))

    def core_ended(self) -> None:
        """A core has ended by itself."""
        self._failed = self._failed or not self._over.is_set()

    def close(self) -> None:
        """Have the other nodes end, in good order unless a core has failed; safe to call twice."""
        if self._over.is_set():
            return
        self._over.set()
        if self._meeting is not None and self._meeting.done() and not self._meeting.exception():
            links, wires = self._meeting.result()
            self._leave(links, wires)

    def _leave(self, links: list[socket.socket], wires: dict[Wire, socket.socket]) -> None:
        for link in links:
            with suppress(OSError):
                if not self._failed:
                    send_frame(link, node_words.encode(Close()))
            link.close()
        for stream in wires.values():
            stream.close()

    def _meet(self, meeting: "asyncio.Future[_Met]") -> None:
        """Wait for the nodes, in a thread of its own."""
        loop = meeting.get_loop()
        try:
            met = self._gathered()
        except (ConfigError, GroupFailed) as error:
            with suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(_settle, meeting, error)
            return
        if self._over.is_set():
            self._leave(*met)
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, meeting, met)

    def _gathered(self) -> _Met:
        parallel = self._config.parallel
        master = Master(parallel, self._patience)
        links = master.gather(fingerprint(self._config), self._patience, self._over)
        joined = master.welcome()
        try:
            return links, connect(CoreLayout(joined.starts, parallel.data_parallel_size), 0, joined, parallel.timeout)
        except GroupFailed:
            for link in links:
                link.close()
            raise


def _settle(meeting: "asyncio.Future[_Met]", told: _Met | Exception) -> None:
    if meeting.done():
        return
    meeting.set_exception(told) if isinstance(told, Exception) else meeting.set_result(told)
