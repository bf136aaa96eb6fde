"""Reads pages of other replicas into this rank's host memory."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine.cache.pages import PageGeometry, copies
from penstock.engine.config import TransportName
from penstock.engine.connectors.transfer import wire
from penstock.engine.connectors.transfer.pulls import lenders
from penstock.engine.connectors.transfer.transport import Inlet, Way, page_sum
from penstock.engine.connectors.transfer.wire import Refused, Stream
from penstock.engine.connectors.transfer.words import Errand, Part, Peer, Pulled

THREADS = 4
CONNECT_S = 3.0
PULL_S = 10.0
"""Seconds in which the pages of one request must have come."""
_IDLE_S = 30.0
"""Age at which an idle connection is not used again; shorter than the lender's patience."""
SWEEP_S = 5.0
"""Between two looks for connections that are too old, or whose lender has gone: they hold its memory."""

_Place = tuple[Peer, int]
"""A replica, and one of its parts of pages."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class _Connection(msgspec.Struct, frozen=True):
    """To one lender."""

    stream: Stream
    way: Way
    transport: str
    page_bytes: int
    """Of the lender's pages."""
    pieces: dict[int, list[tuple[int, int, int]]]
    """By group, what this rank needs of a page: where it begins there and here, and its size. Empty: pages are laid out alike."""

    def close(self) -> None:
        self.way.close()
        self.stream.close()


class Reader:
    """Threads that pull, and the connections that they share.

    Args:
        secret: What the lenders know, too.
        part: Of pages that this rank has: it reads from the ranks that lend the same heads.
        geometry: Of that part.
        slots: [slots, bytes of a page] of the host's memory.
        inlets: What pages can come by, the best first.
    """

    def __init__(
        self,
        secret: bytes,
        part: Part,
        geometry: PageGeometry,
        slots: npt.NDArray[np.uint8],
        inlets: Mapping[TransportName, Inlet],
    ) -> None:
        self._secret, self._fingerprint, self._part = secret, part.name, part
        self._slots, self._inlets, self._geometry = slots, inlets, geometry
        self._lock = threading.Lock()
        self._pulled: dict[int, Pulled] = {}
        self._idle: dict[_Place, list[tuple[_Connection, float]]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "page-reader")
        self._closed = threading.Event()
        threading.Thread(target=self._sweep, name="page-reader-sweep", daemon=True).start()

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
        self._close_idle(lambda connection, age: True)

    def close(self) -> None:
        """Waits for what is under way, and ends all connections."""
        self._closed.set()
        self._threads.shutdown()
        self._close_idle(lambda connection, age: True)

    def _run(self, errand: Errand) -> None:
        begin = time.perf_counter()
        try:
            got, error = self._pull_parts(errand)
        except Exception as problem:  # noqa: BLE001  whatever it is, the request must hear that its pages do not come
            got, error = [], f"{type(problem).__name__}: {problem}"
            if not isinstance(problem, OSError | EOFError | Refused):
                _log.exception("KV pages could not be read")
        with self._lock:
            self._pulled[errand.number] = Pulled(time.perf_counter() - begin, got, error)

    def _tell(self, errand: Errand) -> None:
        assert errand.peer is not None
        for number in lenders(self._part, len(errand.peer.hosts)):
            place, deadline = (errand.peer, number), time.monotonic() + PULL_S
            try:
                self._asking(place, deadline, lambda connection: connection.stream.send(_ask(errand, connection)))
            except (OSError, EOFError, Refused) as error:  # the lease runs out by itself
                _log.info("a lender of KV pages did not hear %r: %s", errand.action, error)

    def _pull_parts(self, errand: Errand) -> tuple[list[int], str | None]:
        """Pages of which all parts have come."""
        assert errand.peer is not None
        deadline, errors = time.monotonic() + PULL_S, list[str]()
        got, hosts = set(range(len(errand.pages))), len(errand.peer.hosts)
        if not (numbers := lenders(self._part, hosts)):
            raise Refused(f"{errand.peer.engine_id} lends {hosts} parts of pages, fewer than there are pipeline stages")
        for number in numbers:
            found, error = self._asking((errand.peer, number), deadline, lambda connection: self._pull(connection, errand))
            got &= set(found)
            errors += [] if error is None else [error]
        return sorted(got), "; ".join(errors) or None

    def _pull(self, connection: _Connection, errand: Errand) -> tuple[list[int], str | None]:
        stream = connection.stream
        stream.send(_ask(errand, connection))
        found = stream.receive(wire.Found)
        if found.error is not None:
            return [], found.error
        if not set(found.places) <= set(range(len(errand.pages))):
            raise Refused("pages that were not asked for")
        if not len(found.places) == len(found.slots) == len(found.sums):
            raise Refused("pages without a slot or a sum")
        pages = [errand.pages[place] for place in found.places]
        cut = connection.pieces
        come = [np.empty(connection.page_bytes, np.uint8) if cut else self._slots[page.slot] for page in pages]
        connection.way.read(stream, found.slots, come)
        if not stream.receive(wire.Sealed).held:
            return [], "the lease ran out while its pages were sent"
        whole = list[int]()
        for place, page, bytes_of, expected in zip(found.places, pages, come, found.sums, strict=True):
            if page_sum(bytes_of) == expected:
                whole.append(place)
                for there, here, size in cut.get(page.group, ()):
                    self._slots[page.slot, here : here + size] = bytes_of[there : there + size]
        missing, damaged = len(errand.pages) - len(found.places), len(found.places) - len(whole)
        problems = [f"{missing} of {len(errand.pages)} pages are not in the lease"] if missing else []
        problems += [f"{damaged} of {len(errand.pages)} pages have not come whole"] if damaged else []
        return whole, "; ".join(problems) or None

    def _asking(self, place: _Place, deadline: float, ask: Callable[[_Connection], _T]) -> _T:
        """Asks on a connection that is there, or on a new one. One that is there may be dead: then it is tried once more."""
        if (idle := self._take_idle(place)) is not None:
            idle.stream.deadline = deadline
            try:
                with self._kept(place, idle):
                    return ask(idle)
            except TimeoutError:
                raise
            except (OSError, EOFError):
                pass  # its lender has closed it since
        connection = self._connect(*place, deadline)
        with self._kept(place, connection):
            return ask(connection)

    def _connect(self, peer: Peer, part: int, deadline: float) -> _Connection:
        if (timeout := min(CONNECT_S, deadline - time.monotonic())) <= 0:
            raise TimeoutError("other parts of these pages have taken all of the time")
        stream = Stream(socket.create_connection((peer.hosts[part], peer.port + part), timeout), deadline)
        try:
            offers, geometry = wire.introduce(stream, self._secret, peer.engine_id, self._fingerprint)
            way, transport = self._open(peer, offers, deadline)
        except BaseException:
            stream.close()
            raise
        return _Connection(stream, way, transport, geometry.layout.page_bytes, self._pieces(geometry))

    def _pieces(self, theirs: PageGeometry) -> dict[int, list[tuple[int, int, int]]]:
        """What this rank needs of a lender's pages; see `_Connection`."""
        if theirs == self._geometry:
            return {}
        found = {group: copies(theirs, group, self._geometry) for group in range(len(theirs.layout.groups))}
        return {group: [(there.begin, here.begin, here.size) for _, there, here in pairs] for group, pairs in found.items()}

    def _open(self, peer: Peer, offers: dict[str, bytes], deadline: float) -> tuple[Way, str]:
        """The first of our transports that the lender has and that works."""
        problems: list[str] = []
        for name, inlet in self._inlets.items():
            if name not in offers:
                problems.append(f"{name} is not there")
                continue
            try:
                way = inlet.open(offers[name], deadline)
            except (OSError, msgspec.MsgspecError) as error:
                problems.append(f"{name}: {error}")
                continue
            _log.info("KV pages of %s come by %s%s", peer.engine_id, name, f" ({'; '.join(problems)})" if problems else "")
            return way, name
        raise Refused(f"there is no transport to {peer.engine_id}: {'; '.join(problems)}")

    @contextmanager
    def _kept(self, place: _Place, connection: _Connection) -> Iterator[None]:
        """Keeps a connection for the next request to this place, unless something goes wrong on it."""
        try:
            yield
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(place, []).append((connection, time.monotonic()))

    def _take_idle(self, place: _Place) -> _Connection | None:
        self._close_idle(lambda connection, age: age > _IDLE_S)
        with self._lock:
            idle = self._idle.get(place)
            return idle.pop()[0] if idle else None

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP_S):
            self._close_idle(lambda connection, age: age > _IDLE_S or connection.stream.has_ended)

    def _close_idle(self, is_due: Callable[[_Connection, float], bool]) -> None:
        due, now = list[_Connection](), time.monotonic()
        with self._lock:
            for place, idle in list(self._idle.items()):
                due += [connection for connection, since in idle if is_due(connection, now - since)]
                kept = [it for it in idle if it[0] not in due]
                if kept:
                    self._idle[place] = kept
                else:
                    del self._idle[place]
        for connection in due:
            connection.close()


def _ask(errand: Errand, connection: _Connection) -> wire.Ask:
    names = [(page.group, page.block_hash) for page in errand.pages]
    return wire.Ask(errand.action, errand.lease, names, connection.transport, errand.readers)
