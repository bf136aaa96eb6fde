"""The ways from one pipeline stage to the next, as the core makes them. Light to import.

A link is memory without a name and a pair of sockets, which the processes inherit. What a step passes on lies in the memory. A
few bytes through the socket tell the next stage that it is there.
"""

import os
import socket
from typing import NamedTuple


class LinkEnd(NamedTuple):
    """File descriptors of one side."""

    memory: int
    socket: int


class Link:
    """From a rank to the rank in its place in the next stage. The core keeps both sides open: so a stage does not notice the end
    of another one, and the core names it."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("penstock-stage")
        self._sender, self._receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @property
    def sender(self) -> LinkEnd:
        """The earlier stage's side."""
        return LinkEnd(self._memory, self._sender.fileno())

    @property
    def receiver(self) -> LinkEnd:
        """The later stage's side."""
        return LinkEnd(self._memory, self._receiver.fileno())

    def close(self) -> None:
        """Lets go of it; safe to call twice."""
        if self._sender.fileno() >= 0:
            self._sender.close()
            self._receiver.close()
            os.close(self._memory)
