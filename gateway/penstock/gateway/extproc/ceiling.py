"""What all requests together may keep of this process: beyond it new ones are refused by name, before anything suffers."""

from penstock.gateway.extproc.call import Refused

MAX_STREAMS = 20_000
"""Requests that wait or have no answer yet."""
MAX_BYTES = 2**30
"""Most bytes of request bodies that are being read or that wait."""
RETRY_S = 1
"""A gateway this full ends thousands of requests a second, or none at all."""


class Ceiling:
    """Counts streams and bytes.

    Args:
        streams: How many may be open.
        size: How many bytes of bodies may be kept.
    """

    def __init__(self, streams: int = MAX_STREAMS, size: int = MAX_BYTES) -> None:
        self._most_streams = streams
        self._most_bytes = size
        self.streams = 0
        self.bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether one more request may enter, with so many bytes of a body."""
        return self.streams < self._most_streams and self.bytes + size <= self._most_bytes

    def enter(self) -> None:
        """One more request; raises `Refused` with 503 where there are too many."""
        if self.streams >= self._most_streams:
            raise _refusal("too many requests are open")
        self.streams += 1

    def grow(self, size: int) -> None:
        """Count more bytes of a body. Raises `Refused` with 503 if all bodies together are too large."""
        if self.bytes + size > self._most_bytes:
            raise _refusal("the bodies of other requests take all its memory")
        self.bytes += size

    def shrink(self, size: int) -> None:
        """Count bytes of a body as sent on."""
        self.bytes -= size

    def leave(self, size: int = 0) -> None:
        """A request that had entered is over, of whose body `size` bytes still counted."""
        self.streams -= 1
        self.bytes -= size


def _refusal(why: str) -> Refused:
    return Refused(503, f"the gateway is overloaded: {why}; try again", "gateway_overloaded", retry_after_s=RETRY_S)
