"""Follows the tenants file: rereads it when it, or what a symbolic link on the way to it points to, has changed."""

import asyncio
import logging
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from penstock.api import metrics
from penstock.gateway.tenants.document import TenantsError, parse
from penstock.gateway.tenants.registry import Registry

log = logging.getLogger(__name__)

POLL_S = 0.5


class TenantsWatcher:
    """Keeps a registry as its file is. Raises `TenantsError` where the file cannot be used at the start; later a bad file changes
    nothing, and says so in the log and as a metric.

    Args:
        path: The file. In a mounted Secret it is reached through links that Kubernetes replaces at one stroke.
        metrics_registry: Where the count of rereads goes.
    """

    def __init__(self, path: Path, metrics_registry: CollectorRegistry) -> None:
        self._path = path
        self._seen = self._stamp()
        self.registry = Registry(parse(self._read()))
        self._reloads = Counter(
            metrics.TENANTS_RELOADS, "Reloads of the tenants file by result", ["result"], registry=metrics_registry
        )

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.look()

    def look(self) -> None:
        """Rereads the file if it has changed."""
        try:
            seen = self._stamp()
            if seen == self._seen:
                return
            self._seen = seen
            self.registry.replace(parse(self._read()))
        except TenantsError as error:
            if str(error) != self._seen:
                log.error("tenants file %s: %s; the tenants stay as they were", self._path, error)
                self._reloads.labels(result="error").inc()
            if not self._path.exists():
                self._seen = str(error)
            return
        log.info("tenants file %s: %d tenants", self._path, sum(1 for _ in self.registry.accounts()))
        self._reloads.labels(result="ok").inc()

    def _stamp(self) -> object:
        """What identifies the content: inode, time and size behind all links."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise TenantsError(f"cannot be read: {error.strerror}") from None
        return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)

    def _read(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise TenantsError(f"cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise TenantsError("not UTF-8") from None
