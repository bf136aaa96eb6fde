"""The core's side of its frontends: one, or several that share the core."""

import socket
from collections.abc import Iterator
from typing import Protocol

import msgspec

from penstock.engine import messages
from penstock.engine.core.ipc.fanout import split
from penstock.engine.core.ipc.links import Link, Links
from penstock.engine.messages import (
    FRONTEND_SHIFT,
    AdaptersChanged,
    ControlDone,
    CoreFailed,
    CoreInput,
    CoreOutput,
    CoreReady,
    FrontendJoined,
    FrontendLeft,
    StepOutputs,
)


class Port(Protocol):
    """Where messages come from and go to."""

    def watch(self, descriptor: int) -> None:
        """Has `poll` wait for something else too."""
        ...

    def poll(self, patience_ms: int) -> bool:
        """Waits until something has come, at most so long, and says whether it has."""
        ...

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived."""
        ...

    def send(self, message: CoreOutput) -> None:
        """Says something to whoever it concerns, without waiting for them to listen."""
        ...

    def finish(self, seconds: float) -> None:
        """Waits at most so long until everything that was said is on its way."""
        ...


class SinglePort:
    """To the frontend that started the core.

    Args:
        connection: To it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._links = Links()
        self._first = self._links.add(connection)
        self.watch, self.poll, self.finish = self._links.watch, self._links.poll, self._links.finish

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived."""
        return map(messages.decode_input, self._links.receive(self._first))

    def send(self, message: CoreOutput) -> None:
        """Says something to the frontend."""
        self._links.send(self._first, messages.encode(message))


class SharedPort(SinglePort):
    """To the process that started the core, which sends no requests, and to the frontends that it has started.

    Each frontend gets a frame of its own requests; what concerns the core as a whole goes to all of them.

    Args:
        connection: To the process that started the core.
        listener: Where frontends connect.
    """

    def __init__(self, connection: socket.socket, listener: socket.socket) -> None:
        super().__init__(connection)
        listener.setblocking(False)
        self._listener = listener
        self.watch(listener.fileno())
        self._strangers: list[Link] = []
        self._joined: dict[int, Link] = {}
        self._left: set[int] = set()
        self._ready: CoreReady | None = None

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived, without what the dead have said."""
        for message in super().receive():
            if isinstance(message, FrontendLeft):
                self._left.add(message.frontend)
                if (link := self._joined.pop(message.frontend, None)) is not None:
                    self._links.remove(link)
            yield message
        self._accept()
        for link in list(self._joined.values()):
            yield from map(messages.decode_input, self._links.receive(link))

    def send(self, message: CoreOutput) -> None:
        """Says something to whoever it concerns."""
        match message:
            case StepOutputs():
                for frontend, frame in split(message):
                    self._send(frontend, messages.encode(frame))
            case ControlDone(call_id):
                self._send(call_id >> FRONTEND_SHIFT, messages.encode(message))
            case CoreFailed():  # told to the others by whoever sees the process end
                self._send(0, messages.encode(message))
            case _:
                payload = messages.encode(message)
                if isinstance(message, CoreReady):
                    self._ready = message
                elif isinstance(message, AdaptersChanged) and self._ready is not None:
                    self._ready = msgspec.structs.replace(self._ready, adapters=message.adapters)
                self._send(0, payload)
                for frontend in self._joined:
                    self._send(frontend, payload)

    def _accept(self) -> None:
        """Takes in who has connected, and whoever of them has said who they are: frontends say nothing else until they hear that
        the core is ready."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            self._strangers.append(self._links.add(connection))
        for link in list(self._strangers):
            for message in map(messages.decode_input, self._links.receive(link)):
                if isinstance(message, FrontendJoined):
                    self._join(message.frontend, link)
        self._strangers = [link for link in self._strangers if not link.is_gone and link not in self._joined.values()]

    def _join(self, frontend: int, link: Link) -> None:
        if frontend in self._left:
            self._links.remove(link)
            return
        self._joined[frontend] = link
        if self._ready is not None:
            self._send(frontend, messages.encode(self._ready))

    def _send(self, frontend: int, payload: bytes) -> None:
        """Nothing where the frontend is gone."""
        link = self._first if frontend == 0 else self._joined.get(frontend)
        if link is not None:
            self._links.send(link, payload)
