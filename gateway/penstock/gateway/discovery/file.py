"""The fleet from a JSON file that another program (the local runtime, a test) replaces atomically."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.api.fleet import Fleet
from penstock.gateway.discovery.document import parse

log = logging.getLogger(__name__)

POLL_S = 0.1


class FileDiscovery:
    """Looks ten times a second for another file; one that is missing or wrong changes nothing and is logged once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = None
        """What identifies the content looked at last: inode, time and size, or the reason why there is none."""

    async def watch(self) -> AsyncIterator[Fleet]:
        """Yield the fleet once it is known completely, and again after each change."""
        last = None
        while True:
            fleet = self._changed()
            if fleet is not None and fleet != last:
                last = fleet
                yield fleet
            await asyncio.sleep(POLL_S)

    def _changed(self) -> Fleet | None:
        """The fleet, if the file changed and is good."""
        try:
            status = self._path.stat()
        except OSError as error:
            self._complain(repr(error))
            return None
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen == self._seen:
            return None
        try:
            fleet = parse(self._path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            self._complain(str(error))
            self._seen = seen
            return None
        self._seen = seen
        return fleet

    def _complain(self, reason: str) -> None:
        if self._seen != reason:
            log.error("fleet file %s: %s; the fleet stays as it was", self._path, reason)
            self._seen = reason
