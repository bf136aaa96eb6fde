"""The process that stands in for a core on another node. The frontend starts it, talks to it and sees it end as it would the
core. It passes on what either side says, and connections to the core's event stream."""

import select
import socket
import sys
from contextlib import suppress

import msgspec

from penstock.engine import messages
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.forward import Forward
from penstock.engine.core.ipc.ports import Port
from penstock.engine.core.ipc.starting import begun
from penstock.engine.messages import CoreFailed, CoreOutput, CoreReady, CoreStart, EventPorts
from penstock.engine.parallel.frames import FrameReader, peer, send_frame


class StandIn:
    """Between a port to frontends and the connection to a core.

    Args:
        start: As the core itself would have it; its `stream` leads to the core.
        port: To the frontends.
        stream: To the core.

    Raises:
        ConfigError: No port is free for the event stream.
    """

    def __init__(self, start: CoreStart, port: Port, stream: socket.socket) -> None:
        self._port, self._stream, self._reader = port, stream, FrameReader(stream)
        self._host = peer(stream)
        self._name = f"data-parallel rank {start.engine_index} ({self._host})"
        self._forwards: tuple[Forward, Forward] | None = None
        if start.events_addresses and start.replay_addresses:
            events, replay = Forward(start.events_addresses, "--events-port"), Forward(start.replay_addresses, "--replay-port")
            self._forwards = events, replay
        port.watch(stream.fileno())

    def run(self) -> None:
        """Pass on messages until the core is gone."""
        while not self._reader.ended:
            self._port.poll(-1)
            for message in self._port.receive():
                with suppress(OSError):  # the core is gone, which reading tells
                    send_frame(self._stream, messages.encode(message))
            if select.select([self._stream], [], [], 0)[0]:
                self._pass_on()
        self._port.send(CoreFailed(f"{self._name} is gone; the log of its node says why"))

    def _pass_on(self) -> None:
        """What the core has said."""
        for frame in self._reader.read():
            self._port.send(self._told(messages.decode_output(frame)))

    def _told(self, message: CoreOutput) -> CoreOutput:
        """The message as it is true on this node."""
        match message:
            case CoreReady(event_ports=EventPorts(events, replay)) if self._forwards is not None:
                for forward, port in zip(self._forwards, (events, replay), strict=True):
                    forward.open((self._host, port))
                here = EventPorts(*(forward.port for forward in self._forwards))
                return msgspec.structs.replace(message, event_ports=here)
            case CoreFailed():
                return msgspec.structs.replace(message, message=f"{self._name}: {message.message}")
            case _:
                return message


def main() -> int:
    """Stands in for the core described on standard input; returns 1 when that is gone."""
    with begun() as (start, port, _):
        try:
            StandIn(start, port, socket.socket(fileno=start.stream)).run()
        except ConfigError as error:
            port.send(CoreFailed(str(error), refused=True))
    return 1


if __name__ == "__main__":
    sys.exit(main())
