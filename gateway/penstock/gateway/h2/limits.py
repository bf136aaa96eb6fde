"""What a peer may ask of a connection, and the bounds on what it may ask too often. Both forms of a connection read them here."""

from typing import NamedTuple

CONNECTION_WINDOW = 64 * 1024 * 1024
"""Bytes that a peer may send ahead on all streams."""
STREAM_WINDOW = 1024 * 1024
"""Bytes that a peer may send ahead on an unread stream."""
MAX_STREAMS = 100_000
"""Open streams. Held requests are such: no usual figure may bound them."""
MAX_BLOCK_BYTES = 64 * 1024
"""A compressed header block, over all its frames."""
MAX_BLOCK_FRAMES = 32
MAX_LIST_BYTES = 32 * 1024
"""A header list, counted as RFC 9113 does: names, values and 32 bytes each."""
MAX_HEADER_BYTES = 256 * 1024 * 1024
"""Header lists of the open streams of a connection, counted so: 2.6 kB each where there are `MAX_STREAMS`."""
MAX_UNREAD_BYTES = 512 * 1024 * 1024
"""Messages, whole or in part, that calls of a connection have not taken yet."""
MAX_UNSENT_BYTES = 256 * 1024 * 1024
"""Most bytes of answers for which the connection's peer gives no window. One stream holds little of that, since writers wait."""
MAX_BACKLOG_BYTES = 4 * 1024 * 1024
"""Control frames that a peer makes us write and does not read."""
WRITE_BYTES = 1024 * 1024
"""Data that is written at once: more waits until that is written, so that a peer that does not read is noticed."""
READ_BYTES = 64 * 1024
"""Bytes of a peer in one read after which others take their turn: more has probably come."""
ENDED_KEPT = MAX_STREAMS
"""Streams that we have ended and whose late frames we expect. A proxy that sends faster than it is read has its resets of them
behind all that fills the connection's window: tens of thousands of requests."""
UPDATES_A_FRAME = 8
"""WINDOW_UPDATEs that are no nuisance, for each frame of data that we send."""

IDLE_PING_S = 20.0
"""Seconds of silence after which a peer is pinged."""
SILENCE_S = 60.0
"""Seconds of silence after which a peer is taken for dead."""
STALL_S = 120.0
"""How long data may wait for a window or a reader without a byte of progress."""


class Rate(NamedTuple):
    """How much may be asked."""

    burst: float
    """At once."""
    per_s: float
    """In the long run."""


CONTROL = Rate(2_000, 200)
"""Frames that cost work and carry nothing: PING, SETTINGS, PRIORITY, empty DATA, unknown ones (CVE-2019-9512 and similar)."""
RESIZES = Rate(1_000_000, 100_000)
"""Streams whose windows a new INITIAL_WINDOW_SIZE changes: one small frame costs work for every open stream."""
RESETS = Rate(20_000, 1_000)
"""Streams that the peer resets (CVE-2023-44487). Clients can leave in crowds; each regular end adds one."""


class Bucket:
    """Tokens that come back with time. `now` is monotonic seconds and never falls."""

    def __init__(self, rate: Rate, now: float) -> None:
        (self._burst, self._per_s), self._at = rate, now
        self._tokens = self._burst

    def take(self, now: float, count: int = 1) -> bool:
        """Take `count` tokens. Return False if there are too few."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < count:
            return False
        self._tokens -= count
        return True

    def give(self) -> None:
        """Puts one back."""
        self._tokens = min(self._burst, self._tokens + 1)
