"""The core's side of its frontends: one, or several that share the core; on the same node, or on another one."""

import socket
from collections.abc import Iterator
from typing import Protocol

import msgspec
import zmq

from penstock.engine import messages
from penstock.engine.core.ipc.fanout import split
from penstock.engine.core.ipc.framing import framed
from penstock.engine.core.ipc.sockets import Context, Socket, has_message, opened
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
from penstock.engine.parallel.frames import FrameReader

_LAST_WORDS_S = 1.0


class FrontendGone(Exception):
    """Nobody needs the core any more."""


class Port(Protocol):
    """Receives and sends messages."""

    def watch(self, socket: Socket | int) -> None:
        """Has `poll` wait for another socket, or for a file descriptor, too."""
        ...

    def poll(self, patience_ms: int) -> bool:
        """Waits until something has come, at most so long, and says whether it has."""
        ...

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived."""
        ...

    def send(self, message: CoreOutput) -> None:
        """Send a message to the frontends that it concerns, without waiting for them."""
        ...


class SinglePort:
    """To the frontend that started the core.

    Args:
        context: Of the socket. What is unsent at the end is sent while it is destroyed.
        address: The path of the frontend's Unix socket.
    """

    def __init__(self, context: Context, address: str) -> None:
        self._poller = zmq.Poller()
        self._first = self._open(context, zmq.DEALER)
        self._first.connect(f"ipc://{address}")

    def watch(self, socket: Socket | int) -> None:
        """Has `poll` wait for another socket, or for a file descriptor, too."""
        self._poller.register(socket, zmq.POLLIN)

    def poll(self, patience_ms: int) -> bool:
        """Waits until something has come, at most so long, and says whether it has."""
        return bool(self._poller.poll(patience_ms))

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived."""
        while has_message(self._first):
            yield messages.decode_input(self._first.recv())

    def send(self, message: CoreOutput) -> None:
        """Says something to the frontend."""
        self._first.send(messages.encode(message), zmq.NOBLOCK)

    def _open(self, context: Context, kind: int) -> Socket:
        socket = opened(context, kind)
        self.watch(socket)
        return socket


class SharedPort(SinglePort):
    """To the process that started the core, which sends no requests, and to the frontends that it has started.

    Each frontend gets frames of its own requests. Messages about the core as a whole go to all of them.

    Args:
        context: As for `SinglePort`.
        address: The path of the Unix socket of the process that started the core.
        frontends_address: The path of the one where frontends connect.
    """

    def __init__(self, context: Context, address: str, frontends_address: str) -> None:
        super().__init__(context, address)
        self._router = self._open(context, zmq.ROUTER)
        self._router.bind(f"ipc://{frontends_address}")
        self._joined: dict[int, bytes] = {}
        """Frontend → its name on the socket."""
        self._left: set[int] = set()
        self._ready: CoreReady | None = None

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived, without what the dead have said."""
        for message in super().receive():
            if isinstance(message, FrontendLeft):
                self._left.add(message.frontend)
                self._joined.pop(message.frontend, None)
            yield message
        while has_message(self._router):
            name, payload = self._router.recv_multipart()
            message = messages.decode_input(payload)
            if isinstance(message, FrontendJoined):
                self._join(message.frontend, name)
            elif name in self._joined.values():
                yield message

    def send(self, message: CoreOutput) -> None:
        """Send a message to the frontends that it concerns."""
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

    def _join(self, frontend: int, name: bytes) -> None:
        if frontend in self._left:
            return
        self._joined[frontend] = name
        if self._ready is not None:
            self._send(frontend, messages.encode(self._ready))

    def _send(self, frontend: int, payload: bytes) -> None:
        """Send to a frontend, unless it is gone."""
        if frontend == 0:
            self._first.send(payload, zmq.NOBLOCK)
        elif (name := self._joined.get(frontend)) is not None:
            self._router.send_multipart([name, payload], zmq.NOBLOCK)


class StreamPort:
    """To a frontend on another node, whose `stand_in` is at the other end.

    Args:
        stream: Closed there when nobody needs this core any more.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream, self._reader = stream, FrameReader(stream)
        self._unsent = bytearray()
        """A step never waits for the other node."""
        self._poller = zmq.Poller()
        self.watch(stream.fileno())

    def watch(self, socket: Socket | int) -> None:
        """Has `poll` wait for another socket, or for a file descriptor, too."""
        self._poller.register(socket, zmq.POLLIN)

    def poll(self, patience_ms: int) -> bool:
        """Waits until something has come, at most so long, and says whether it has. Sends what there was no room for."""
        self._poller.modify(self._stream.fileno(), zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0))
        events = self._poller.poll(patience_ms)
        if self._unsent:
            self._flush()
        return any(event & ~zmq.POLLOUT for _, event in events)

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived. Raises `FrontendGone` where the other end is closed."""
        try:
            frames = self._reader.read()
        except BlockingIOError:
            return
        yield from map(messages.decode_input, frames)
        if self._reader.ended:
            raise FrontendGone

    def send(self, message: CoreOutput) -> None:
        """Says something to the frontend. The last word is sent before this returns."""
        self._unsent += framed(messages.encode(message))
        if isinstance(message, CoreFailed):
            self._stream.settimeout(_LAST_WORDS_S)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._stream.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # the other end is gone, which reading tells
            self._unsent.clear()
