"""A port of this node whose connections go on to a port of another one: by it, clients of one address reach the event streams of
all data-parallel ranks."""

import logging
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from penstock.engine.config import ConfigError

_PIECE = 1 << 16
_CONNECT_S = 10.0
_RETRY_S = 0.5

_log = logging.getLogger(__name__)


class Forward:
    """Listens from the start; connections wait until `open`.

    Args:
        addresses: `tcp://HOST:PORT` each, where the port may be `*`: the first free one is used.
        flag: That names them; `ConfigError` has it where none is free.
    """

    def __init__(self, addresses: Sequence[str], flag: str) -> None:
        self._listener = _bound(addresses, flag)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def open(self, target: tuple[str, int]) -> None:
        """Has connections go to a port of the other node, until the process ends."""
        threading.Thread(target=self._accept, args=[target], name="forward", daemon=True).start()

    def _accept(self, target: tuple[str, int]) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError as error:  # too many open files: others close theirs
                _log.warning("a connection on port %d cannot be taken: %s", self.port, error)
                time.sleep(_RETRY_S)
                continue
            try:
                there = socket.create_connection(target, _CONNECT_S)
            except OSError as error:
                _log.warning("%s:%d cannot be reached: %s", *target, error)
                client.close()
                continue
            there.settimeout(None)
            for ends in ((client, there), (there, client)):
                threading.Thread(target=_pump, args=ends, name="forward", daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Passes on what one end says, until either is closed; then both are."""
    with suppress(OSError):
        while data := source.recv(_PIECE):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()


def _bound(addresses: Sequence[str], flag: str) -> socket.socket:
    problem = ""
    for address in addresses:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        place = host.strip("[]"), 0 if port == "*" else int(port)
        listener = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError as error:
            listener.close()
            problem = f"{address} cannot be bound: {error.strerror}"
            continue
        listener.listen()
        if problem:
            _log.warning("%s: %s; port %d is used instead", flag, problem, listener.getsockname()[1])
        return listener
    raise ConfigError(f"{flag}: {problem}")
