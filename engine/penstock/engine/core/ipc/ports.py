"""The core's sockets towards its frontends: one, or several that share the core."""

from collections.abc import Iterator
from typing import Protocol

import zmq

from penstock.engine import messages
from penstock.engine.core.ipc.fanout import split
from penstock.engine.messages import (
    FRONTEND_SHIFT,
    ControlDone,
    CoreFailed,
    CoreInput,
    CoreOutput,
    CoreReady,
    FrontendJoined,
    FrontendLeft,
    StepOutputs,
)

Socket = zmq.Socket[bytes]


class Port(Protocol):
    """Where messages come from and go to."""

    @property
    def sockets(self) -> list[Socket]:
        """Those to be polled for input."""
        ...

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived."""
        ...

    def send(self, message: CoreOutput) -> None:
        """Says something to whoever it concerns."""
        ...


class SinglePort:
    """To the frontend that started the core.

    Args:
        socket: The DEALER, connected.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self.sockets = [socket]

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived."""
        while self._socket.poll(0):
            yield messages.decode_input(self._socket.recv())

    def send(self, message: CoreOutput) -> None:
        """Says something to the frontend."""
        self._socket.send(messages.encode(message))


class SharedPort:
    """To the process that started the core, which sends no requests, and to the frontends that it has started.

    Each frontend gets a frame of its own requests; what concerns the core as a whole goes to all of them.

    Args:
        first: The DEALER to the process that started the core.
        context: Where the ROUTER is made.
        address: Of the ROUTER.
    """

    def __init__(self, first: Socket, context: "zmq.Context[Socket]", address: str) -> None:
        self._first = SinglePort(first)
        self._router = context.socket(zmq.ROUTER)
        self._router.set_hwm(0)
        self._router.bind(address)
        self.sockets = [first, self._router]
        self._joined: dict[int, bytes] = {}
        self._left: set[int] = set()
        self._ready: bytes | None = None

    def receive(self) -> Iterator[CoreInput]:
        """What has arrived, without what the dead have said."""
        for message in self._first.receive():
            if isinstance(message, FrontendLeft):
                self._joined.pop(message.frontend, None)
                self._left.add(message.frontend)
            yield message
        while self._router.poll(0):
            identity, payload = self._router.recv_multipart()
            message = messages.decode_input(payload)
            if isinstance(message, FrontendJoined):
                self._join(message.frontend, identity)
            elif identity in self._joined.values():
                yield message

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
                    self._ready = payload
                self._send(0, payload)
                for frontend in self._joined:
                    self._send(frontend, payload)

    def _join(self, frontend: int, identity: bytes) -> None:
        if frontend in self._left:
            return
        self._joined[frontend] = identity
        if self._ready is not None:
            self._send(frontend, self._ready)

    def _send(self, frontend: int, payload: bytes) -> None:
        """Nothing where the frontend is gone."""
        if frontend == 0:
            self._first.sockets[0].send(payload)
        elif (identity := self._joined.get(frontend)) is not None:
            self._router.send_multipart([identity, payload])
