"""Reads pages of other replicas into this rank's host memory."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.engine.connectors.transfer import wire
from penstock.engine.connectors.transfer.wire import Refused, Stream
from penstock.engine.connectors.transfer.words import Errand, Peer, Pulled

THREADS = 4
CONNECT_S = 3.0
PULL_S = 10.0
"""Seconds in which the pages of one request must have come."""
_IDLE_S = 30.0
"""Age at which an idle connection is not used again; shorter than the lender's patience."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Reader:
    """Threads that pull, and the connections that they share.

    Args:
        secret: What the lenders know, too.
        fingerprint: What decides about the bytes of this rank's pages.
        slots: [slots, bytes of a page] of the host's memory.
        rank: Of this process: it reads from the same rank of the lender.
    """

    def __init__(self, secret: bytes, fingerprint: str, slots: npt.NDArray[np.uint8], rank: int) -> None:
        self._secret, self._fingerprint = secret, fingerprint
        self._slots, self._rank = slots, rank
        self._lock = threading.Lock()
        self._pulled: dict[int, Pulled] = {}
        self._idle: dict[Peer, list[tuple[Stream, float]]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "page-reader")

    def pull(self, errand: Errand) -> None:
        """Begins to read pages; `take` says how that has ended."""
        self._threads.submit(self._run, errand)

    def tell(self, errand: Errand) -> None:
        """Releases or renews a lease, if its lender can be reached."""
        self._threads.submit(self._tell, errand)

    def take(self) -> dict[int, Pulled]:
        """Pulls that have ended since the last call."""
        with self._lock:
            pulled, self._pulled = self._pulled, {}
        return pulled

    def rename(self, fingerprint: str) -> None:
        """The weights are other ones: lenders must hear so."""
        with self._lock:
            self._fingerprint = fingerprint
            idle, self._idle = self._idle, {}
        for stream, _ in [it for streams in idle.values() for it in streams]:
            stream.close()

    def _run(self, errand: Errand) -> None:
        begin = time.perf_counter()
        try:
            got, error = self._asking(errand, lambda stream: self._pull(stream, errand))
        except Exception as problem:  # noqa: BLE001  whatever it is, the request must hear that its pages do not come
            got, error = [], f"{type(problem).__name__}: {problem}"
            if not isinstance(problem, OSError | EOFError | Refused):
                _log.exception("KV pages could not be read")
        with self._lock:
            self._pulled[errand.number] = Pulled(time.perf_counter() - begin, got, error)

    def _tell(self, errand: Errand) -> None:
        try:
            self._asking(errand, lambda stream: stream.send(wire.Ask(errand.action, errand.lease)))
        except (OSError, EOFError, Refused) as error:  # the lease runs out by itself
            _log.info("a lender of KV pages did not hear %r: %s", errand.action, error)

    def _pull(self, stream: Stream, errand: Errand) -> tuple[list[int], str | None]:
        stream.send(wire.Ask("pull", errand.lease, [(page.group, page.block_hash) for page in errand.pages]))
        found = stream.receive(wire.Found)
        if found.error is not None:
            return [], found.error
        if not set(found.places) <= set(range(len(errand.pages))):
            raise Refused("pages that were not asked for")
        for place in found.places:
            stream.receive_into(memoryview(self._slots[errand.pages[place].slot]))
        if not stream.receive(wire.Sealed).held:
            return [], "the lease ran out while its pages were sent"
        missing = len(errand.pages) - len(found.places)
        return found.places, f"{missing} of {len(errand.pages)} pages are not in the lease" if missing else None

    def _asking(self, errand: Errand, ask: Callable[[Stream], _T]) -> _T:
        """Asks on a connection that is there, or on a new one. One that is there may be dead: then it is tried once more."""
        assert errand.peer is not None
        deadline = time.monotonic() + PULL_S
        if (idle := self._take_idle(errand.peer, deadline)) is not None:
            try:
                with self._kept(errand.peer, idle):
                    return ask(idle)
            except TimeoutError:
                raise
            except (OSError, EOFError):
                pass  # its lender has closed it since
        stream = self._connect(errand.peer, deadline)
        with self._kept(errand.peer, stream):
            return ask(stream)

    def _connect(self, peer: Peer, deadline: float) -> Stream:
        timeout = min(CONNECT_S, deadline - time.monotonic())
        stream = Stream(socket.create_connection((peer.host, peer.port + self._rank), timeout), deadline)
        try:
            wire.introduce(stream, self._secret, peer.engine_id, self._fingerprint)
        except BaseException:
            stream.close()
            raise
        return stream

    @contextmanager
    def _kept(self, peer: Peer, stream: Stream) -> Iterator[None]:
        """Keeps a connection for the next request to this peer, unless something goes wrong on it."""
        try:
            yield
        except BaseException:
            stream.close()
            raise
        with self._lock:
            self._idle.setdefault(peer, []).append((stream, time.monotonic()))

    def _take_idle(self, peer: Peer, deadline: float) -> Stream | None:
        now = time.monotonic()
        with self._lock:
            for other, streams in list(self._idle.items()):
                for stream, since in [it for it in streams if now - it[1] > _IDLE_S]:
                    stream.close()
                    streams.remove((stream, since))
                if not streams:
                    del self._idle[other]
            streams = self._idle.get(peer)
            stream = streams.pop()[0] if streams else None
        if stream is not None:
            stream.deadline = deadline
        return stream
