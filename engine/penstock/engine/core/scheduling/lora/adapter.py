"""An adapter as the scheduler sees it."""

from enum import IntEnum

from penstock.engine.messages import AdapterInfo


class Residency(IntEnum):
    """Where an adapter's weights are. Weights in a slot are in host memory too."""

    ON_DISK = 0
    READING = 1
    IN_HOST = 2


class Adapter:
    """One adapter from the command that loads it to its last request."""

    __slots__ = (
        "copy",
        "digests",
        "info",
        "num_live",
        "num_running",
        "published",
        "residency",
        "retired",
        "slot",
        "turn_began",
        "used",
    )

    def __init__(self, info: AdapterInfo) -> None:
        self.info = info
        self.residency = Residency.ON_DISK
        self.copy = -1
        """The number of its copy in the host's memory, a new one each time that it is read."""
        self.digests: tuple[bytes, ...] = ()
        """Digests of its weights on each rank at the last read. Empty before."""
        self.slot = -1
        """Its slot on the device; -1: it has none."""
        self.num_live = 0
        """Requests, waiting and running."""
        self.num_running = 0
        self.used = 0
        """A number that rises with each use of any adapter."""
        self.turn_began = 0.0
        """When it began to run, having had nothing that ran; Unix time in seconds."""
        self.retired = False
        """Unloaded: its last requests go on, and there are no new ones."""
        self.published: set[bytes] = set()
        """Names of blocks that the cache may hold of it."""

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return self.num_live - self.num_running

    @property
    def is_evictable(self) -> bool:
        """Whether the host's memory may give it up: nothing of it runs, and either nothing waits for it or it has had a turn."""
        return self.residency is Residency.IN_HOST and self.num_running == 0 and (self.num_live == 0 or self.slot >= 0)
