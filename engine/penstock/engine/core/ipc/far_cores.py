"""The cores of a replica that are on other nodes, as the node with the frontend sees them. Light to import: no torch."""

import asyncio
import socket
import threading
from contextlib import suppress

from penstock.engine.config import EngineConfig
from penstock.engine.core.ipc.coupling import Coupling
from penstock.engine.parallel import node_words
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.fingerprint import fingerprint
from penstock.engine.parallel.frames import send_frame
from penstock.engine.parallel.layout import CoreLayout
from penstock.engine.parallel.node_words import Close, CoreLost
from penstock.engine.parallel.rendezvous import JOIN_S, Master, connect

_Met = tuple[list[socket.socket], dict[int, socket.socket]]
"""A connection to each other node, and by number one to each core there."""


class FarCores:
    """Waits for the other nodes as soon as one of their cores is asked for.

    Args:
        config: Of the replica.
        coupling: Of cores that divide experts: gets the connections to those elsewhere.
        patience: Seconds for the nodes to come.
    """

    def __init__(self, config: EngineConfig, coupling: Coupling | None = None, patience: float = JOIN_S) -> None:
        self._config, self._coupling, self._patience = config, coupling, patience
        self._meeting: asyncio.Future[_Met] | None = None
        self._over = threading.Event()
        self._failed = False

    async def streams(self) -> dict[int, socket.socket]:
        """The connections to cores elsewhere, once all nodes have come. The caller takes away and closes those that it uses.

        Raises:
            ConfigError: A node differs from this one, or this one cannot be reached as it was asked to.
            GroupFailed: A node has not come.
        """
        if self._meeting is None:
            self._meeting = asyncio.get_running_loop().create_future()
            # Not a task's thread, for which the end of the process would wait.
            threading.Thread(target=self._meet, args=[self._meeting], name="meeting", daemon=True).start()
        _, streams = await asyncio.shield(self._meeting)
        return streams

    def core_ended(self, core: int) -> None:
        """A core has ended by itself: the other nodes are told, whose cores may wait for it."""
        if self._over.is_set():
            return
        self._failed = True
        for link in self._links:
            with suppress(OSError):
                send_frame(link, node_words.encode(CoreLost(core)))

    @property
    def _links(self) -> list[socket.socket]:
        if self._meeting is None or not self._meeting.done() or self._meeting.exception():
            return []
        return self._meeting.result()[0]

    def close(self) -> None:
        """Have the other nodes end, in good order unless a core has failed; safe to call twice."""
        if self._over.is_set():
            return
        self._over.set()
        if self._links and self._meeting is not None:
            self._leave(*self._meeting.result())

    def _leave(self, links: list[socket.socket], streams: dict[int, socket.socket]) -> None:
        for link in links:
            with suppress(OSError):
                if not self._failed:
                    send_frame(link, node_words.encode(Close()))
            link.close()
        for stream in streams.values():
            stream.close()

    def _meet(self, meeting: "asyncio.Future[_Met]") -> None:
        """Wait for the nodes, in a thread of its own."""
        try:
            told: _Met | Exception = self._gathered()
        except Exception as error:  # noqa: BLE001 - whatever it is, the start waits for it
            told = error
        try:
            meeting.get_loop().call_soon_threadsafe(self._settle, meeting, told)
        except RuntimeError:  # the loop is gone, with those who wait
            self._abandoned(told)

    def _settle(self, meeting: "asyncio.Future[_Met]", told: "_Met | Exception") -> None:
        """On the loop, as `close` is, which has not seen nodes that come after it."""
        if self._over.is_set():
            told = self._abandoned(told)
        if meeting.done():
            return
        meeting.set_exception(told) if isinstance(told, Exception) else meeting.set_result(told)

    def _abandoned(self, told: "_Met | Exception") -> Exception:
        if isinstance(told, Exception):
            return told
        self._leave(*told)
        return GroupFailed("the engine has been closed")

    def _gathered(self) -> _Met:
        parallel = self._config.parallel
        master = Master(parallel, self._patience)
        links = master.gather(fingerprint(self._config), self._patience, self._over)
        joined = master.welcome()
        layout = CoreLayout.of(parallel, joined.starts)
        try:
            wires = connect(layout, 0, joined, parallel.timeout)
        except GroupFailed:
            for link in links:
                link.close()
            raise
        streams = {wire.receiver // layout.tensor: wires.pop(wire) for wire in layout.wires() if wire.kind == "core"}
        if self._coupling is not None:
            self._coupling.connect(wires)
        return links, streams
