"""Connections to a port of an engine's nodes that have not said yet whose they are. Anybody may make them."""

import logging
import select
import socket
import time
from typing import Final, NamedTuple

from penstock.engine.parallel import node_words
from penstock.engine.parallel.frames import FirstFrame, peer
from penstock.engine.parallel.node_words import MAX_GREETING, Greeting

_GREETING_S: Final = 10.0
"""Seconds in which a connection must say what it is."""
_MOST: Final = 128
"""Connections that say nothing, at once. A node speaks at once: so the oldest is none."""

log = logging.getLogger(__name__)


class _Caller(NamedTuple):
    link: socket.socket
    first: FirstFrame
    limit: float
    """The time when its greeting is too late."""


class Callers:
    """Takes connections in, and tells those apart that greet.

    Args:
        listener: Where they come.
        poll: Waits for it and for them; `hear` is to get what it finds of them.
    """

    def __init__(self, listener: socket.socket, poll: select.poll) -> None:
        self._listener, self._poll = listener, poll
        self._callers = dict[int, _Caller]()
        """By file descriptor, the oldest first."""
        poll.register(listener, select.POLLIN)

    def __contains__(self, fd: int) -> bool:
        return fd == self._listener.fileno() or fd in self._callers

    def links(self) -> list[socket.socket]:
        """Of those that have not greeted."""
        return [caller.link for caller in self._callers.values()]

    def hear(self, fd: int) -> tuple[socket.socket, Greeting] | None:
        """Take in what has come; return the connection of one that has greeted, which waits for nothing, and what it has said."""
        if fd == self._listener.fileno():
            self._accept()
            return None
        link, first, _ = self._callers[fd]
        try:
            if (frame := first.read()) is None:
                if first.ended:
                    self._turn_away(fd, "it was closed")
                return None
            hello = node_words.decode_greeting(frame)
        except ValueError as error:
            self._turn_away(fd, error)
            return None
        self._poll.unregister(fd)
        del self._callers[fd]
        return link, hello

    def forget(self) -> None:
        """Drop those that have said nothing for too long, and the oldest where there are too many. `hear` must have had all that
        the poll has found."""
        now = time.monotonic()
        for fd in [fd for fd, caller in self._callers.items() if now > caller.limit]:
            self._turn_away(fd, f"it said nothing for {_GREETING_S:g} seconds")
        for fd in list(self._callers)[:-_MOST]:
            self._turn_away(fd, f"{_MOST} others say nothing either")

    def close(self) -> None:
        """Drop all; the listener stays."""
        self._poll.unregister(self._listener)
        for fd in list(self._callers):
            self._drop(fd)

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        link.setblocking(False)
        self._callers[link.fileno()] = _Caller(link, FirstFrame(link, MAX_GREETING), time.monotonic() + _GREETING_S)
        self._poll.register(link, select.POLLIN)

    def _turn_away(self, fd: int, why: object) -> None:
        log.warning("a connection from %s is no node's: %s", peer(self._callers[fd].link), why)
        self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._callers.pop(fd).link.close()
