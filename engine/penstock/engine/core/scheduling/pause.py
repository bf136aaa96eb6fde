"""Whether the scheduler may plan, and whether it takes requests."""

from enum import IntEnum

import msgspec


class PauseState(IntEnum):
    """What a scheduler may do; set by whoever controls the engine. Nothing is lost in any state."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Running requests go on; nobody is admitted, preempted ones included."""
    PAUSED_ALL = 2
    """Nothing is planned. Plans in flight still come home."""


class Closed(msgspec.Struct, frozen=True):
    """Why no request is taken."""

    error: str
    code: str
    """See `messages.Finished`."""
