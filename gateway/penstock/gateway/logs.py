"""The gateway's log. A warning that comes again within a minute is counted instead of repeated."""

import logging
import time
from collections.abc import Callable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PERIOD_S = 60.0
KEPT = 1_000
"""Different warnings that are remembered at most."""


class CountRepeats(logging.Filter):
    """Lets a warning or an error pass once in a minute. The next one after that says how many were left out.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}
        """When a warning was last written, and how many equal ones came since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.levelno < logging.WARNING or record.exc_info:
            return True
        text = record.getMessage()
        key, now = (record.name, record.levelno, text), self._clock()
        written, left_out = self._seen.pop(key, (None, 0))
        if written is not None and now - written < PERIOD_S:
            self._seen[key] = written, left_out + 1
            return False
        if left_out and written is not None:
            record.msg, record.args = f"{text} (and {left_out} times more in the last {now - written:.0f} s)", ()
        self._seen[key] = now, 0
        if len(self._seen) > KEPT:
            del self._seen[next(iter(self._seen))]
        return True


def log_to_stderr(level: str) -> None:
    """Begins to write what is logged from this level on."""
    handler = logging.StreamHandler()
    handler.addFilter(CountRepeats())
    logging.basicConfig(level=level, format=FORMAT, handlers=[handler])
