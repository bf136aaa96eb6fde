"""One rank's pages for other replicas: a server that sends what has been lent, and nothing else."""

import contextlib
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.engine.cache.pages import PageGeometry
from penstock.engine.config import ConfigError, TransportName
from penstock.engine.connectors.transfer import wire
from penstock.engine.connectors.transfer.transport import Outlet, page_sum
from penstock.engine.connectors.transfer.wire import Refused, Stream
from penstock.engine.connectors.transfer.words import Page

MAX_READERS = 64
"""Connections at a time."""
IDLE_S = 60.0
"""Silence after which a reader's connection is closed."""
SEND_S = 30.0
"""Seconds in which the pages of one request must have been taken."""
GRANT_S = 5.0
"""Seconds that a reader waits for a lease: its request may be here before the pages are."""
_REMEMBERED = 4096
"""Ended leases that are known as such."""

_log = logging.getLogger(__name__)


class Lender:
    """Listens from its construction on.

    Args:
        address: Host and port.
        secret: What readers must know.
        engine_id: This replica.
        fingerprint: What decides about the bytes of its pages.
        slots: [slots, bytes of a page] of the host's memory.
        outlets: What pages can go by.
        geometry: Of this rank's pages.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        engine_id: str,
        fingerprint: str,
        slots: npt.NDArray[np.uint8],
        outlets: Mapping[TransportName, Outlet],
        geometry: PageGeometry,
    ) -> None:
        self._secret, self._engine_id, self._fingerprint = secret, engine_id, fingerprint
        self._slots, self._geometry = slots, geometry
        self._outlets: dict[str, Outlet] = {**outlets}
        self._changed = threading.Condition()
        self._leases: dict[str, dict[tuple[int, bytes], int]] = {}
        self._ended = OrderedDict[str, None]()
        self._released: list[tuple[str, int]] = []
        self._renewed: list[str] = []
        self._readers: set[socket.socket] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(address, family=family, backlog=MAX_READERS)
        except OSError as error:
            raise ConfigError(
                f"--kv-transfer-config: {address[0]}:{address[1]} cannot be listened on: {error.strerror}"
            ) from error
        threading.Thread(target=self._listen, name="page-lender", daemon=True).start()

    @property
    def port(self) -> int:
        """On which it listens."""
        return self._listener.getsockname()[1]

    def grant(self, lease: str, pages: list[Page]) -> None:
        """The reader of this lease may have these pages; their slots stay as they are until the lease is revoked."""
        with self._changed:
            self._leases[lease] = {(page.group, page.block_hash): page.slot for page in pages}
            self._changed.notify_all()

    def revoke(self, lease: str) -> None:
        """Its slots may be written again. Who reads them now is told so at the end."""
        with self._changed:
            self._leases.pop(lease, None)
            self._ended[lease] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
            self._changed.notify_all()

    def rename(self, fingerprint: str) -> None:
        """The weights are other ones: readers must introduce themselves again."""
        with self._changed:
            self._fingerprint = fingerprint
            readers = list(self._readers)
        _shut(readers)

    def take(self) -> tuple[list[tuple[str, int]], list[str]]:
        """Leases released, each with how often the reader does so in all, and leases renewed since the last call."""
        with self._changed:
            released, self._released = self._released, []
            renewed, self._renewed = self._renewed, []
        return released, renewed

    def close(self) -> None:
        """Stops listening, and drops all readers."""
        with self._changed:
            self._closed = True
            readers = list(self._readers)
            self._changed.notify_all()
        _shut([self._listener, *readers])
        self._listener.close()
        for outlet in self._outlets.values():
            outlet.close()

    def _listen(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                _log.exception("a reader of KV pages could not be let in")
                time.sleep(0.1)
                continue
            with self._changed:
                crowded = self._closed or len(self._readers) >= MAX_READERS
                if not crowded:
                    self._readers.add(reader)
            if crowded:
                reader.close()
            else:
                threading.Thread(target=self._serve, args=[reader], name="page-reader", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        stream = Stream(sock, time.monotonic() + GRANT_S)
        try:
            offers = {name: outlet.offer() for name, outlet in self._outlets.items()}
            wire.admit(stream, self._secret, self._engine_id, self._fingerprint, offers, self._geometry)
            while True:
                stream.deadline = time.monotonic() + IDLE_S
                self._obey(stream, stream.receive(wire.Ask))
        except Refused as error:
            _log.warning("a reader of KV pages was refused: %s", error)
        except (EOFError, OSError) as error:
            _log.debug("a reader of KV pages has gone: %s", error)
        finally:
            with self._changed:
                self._readers.discard(sock)
            stream.close()

    def _obey(self, stream: Stream, ask: wire.Ask) -> None:
        stream.deadline = time.monotonic() + SEND_S
        match ask.action:
            case "pull":
                self._send(stream, ask)
            case "release":
                self._release(ask)
            case "renew":
                with self._changed:
                    if ask.lease not in self._ended:
                        self._renewed.append(ask.lease)
            case other:
                raise Refused(f"no action {other!r}")

    def _send(self, stream: Stream, ask: wire.Ask) -> None:
        if (outlet := self._outlets.get(ask.transport)) is None:
            raise Refused(f"no transport {ask.transport!r}")
        with self._changed:
            self._changed.wait_for(lambda: ask.lease in self._leases or ask.lease in self._ended or self._closed, GRANT_S)
            lent = self._leases.get(ask.lease)
        if lent is None:
            stream.send(wire.Found([], error=f"there is no lease {ask.lease!r}, or it has run out"))
            return
        places = [at for at, name in enumerate(ask.pages) if name in lent]
        slots = [lent[ask.pages[at]] for at in places]
        stream.send(wire.Found(places, slots, [page_sum(self._slots[slot]) for slot in slots]))
        outlet.send(stream, slots)
        with self._changed:
            held = self._leases.get(ask.lease) is lent
        stream.send(wire.Sealed(held))
        self._release(ask)

    def _release(self, ask: wire.Ask) -> None:
        with self._changed:
            if ask.lease not in self._ended:
                self._released.append((ask.lease, ask.readers))


def _shut(sockets: list[socket.socket]) -> None:
    """Ends connections. A thread that waits on one does not see that it was closed: `shutdown` wakes it."""
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
