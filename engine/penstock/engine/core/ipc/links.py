"""The core's connections to its frontends, as the step loop uses them: neither reading nor writing waits for the other side."""

import select
import socket
import threading
from contextlib import suppress

from penstock.engine.core.ipc.framing import Unframer, framed

REST_MS = 2
"""How long the rest of a message is waited for after each piece: whoever sends one larger than a socket's buffer fills it again
as soon as it is read, and in the next turn it would come a step later."""

_READ_BYTES = 2**18


class Link:
    """One connection. What its other end does not read gathers here, since nothing may be dropped: requests are bounded by the
    core's queue, outputs by what the requests generate. While anything has gathered, a thread sends it as it is read, however
    long the step takes that the loop is in.

    Args:
        connection: A stream socket, connected.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._frames = Unframer()
        self._unsent = bytearray()
        self._writing = threading.Lock()
        """Held by whoever writes; what is unsent is theirs."""
        self._sender: threading.Thread | None = None
        self.is_gone = False
        """Whether nobody is at the other end any more. What is sent there is lost."""

    def fileno(self) -> int:
        """Of the connection."""
        return self._connection.fileno()

    def receive(self) -> list[bytes]:
        """What has arrived, and the rest of a message of which a piece has; nothing once it is gone."""
        complete: list[bytes] = []
        came = False
        while not self.is_gone:
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                if came and self._frames.is_amid and self._readable.poll(REST_MS):
                    continue
                break
            except ConnectionError:
                data = b""
            complete += self._frames.feed(data)
            came, self.is_gone = True, not data
        return complete

    def send(self, payload: bytes) -> None:
        """Sends a message, at once or behind what waits."""
        data = framed(payload)
        with self._writing:
            if self._unsent:
                self._unsent += data
            elif (sent := self._write(data)) < len(data):
                self._unsent += data[sent:]
                self._sender = threading.Thread(target=self._catch_up, name="frontend-sender", daemon=True)
                self._sender.start()

    def finish(self, seconds: float) -> None:
        """Waits at most so long until everything is sent."""
        if self._sender is not None:
            self._sender.join(seconds)

    def close(self) -> None:
        """Neither reads nor sends any more."""
        self.is_gone = True
        if self._sender is not None:
            with suppress(OSError):  # the other end may have closed it
                self._connection.shutdown(socket.SHUT_RDWR)  # which wakes the sender, and has it lose what is left
            self._sender.join()
        self._connection.close()

    def _catch_up(self) -> None:
        """Sends what waits until nothing does."""
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        while True:
            writable.poll()
            with self._writing:
                del self._unsent[: self._write(self._unsent)]
                if not self._unsent:  # to be known before anybody else may begin a sender
                    return

    def _write(self, data: bytes | bytearray) -> int:
        """Bytes that are off; all of them where nobody will read them."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except ConnectionError:
            return len(data)


class Links:
    """Connections that are waited for together, and whatever else can be."""

    def __init__(self) -> None:
        self._poller = select.poll()
        self._links: dict[int, Link] = {}

    def watch(self, descriptor: int) -> None:
        """Has `poll` wait for it too."""
        self._poller.register(descriptor, select.POLLIN)

    def add(self, connection: socket.socket) -> Link:
        """Another connection."""
        link = Link(connection)
        self._links[link.fileno()] = link
        self.watch(link.fileno())
        return link

    def remove(self, link: Link) -> None:
        """Closes one; safe to call twice."""
        if self._links.pop(link.fileno(), None) is not None:
            self._poller.unregister(link.fileno())
            link.close()

    def poll(self, patience_ms: int) -> bool:
        """Waits until something has come, at most so long, and says whether it has."""
        return bool(self._poller.poll(patience_ms))

    def receive(self, link: Link) -> list[bytes]:
        """What has arrived from one, which is removed where it has ended."""
        messages = link.receive()
        if link.is_gone:
            self.remove(link)
        return messages

    def send(self, link: Link, payload: bytes) -> None:
        """To one of them; of no effect where it has been removed."""
        if link.fileno() in self._links:
            link.send(payload)

    def finish(self, seconds: float) -> None:
        """Waits at most so long, for each, until everything is sent."""
        for link in self._links.values():
            link.finish(seconds)
