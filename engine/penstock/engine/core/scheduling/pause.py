"""Whether the scheduler may plan, and whether it takes requests."""

from enum import IntEnum

import msgspec


class PauseState(IntEnum):
    """What a scheduler may do; set by control commands. Nothing is lost in any state."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Running requests continue. No request is admitted, preempted ones included."""
    PAUSED_ALL = 2
    """Nothing is planned. Plans in flight still finish."""


class Closed(msgspec.Struct, frozen=True):
    """Why no request is taken."""

    error: str
    code: str
    """Code of the error for clients, as in `messages.Finished`."""
