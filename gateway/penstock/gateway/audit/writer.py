"""Lines to a file or to standard output, on a thread of their own: no request waits for a disk."""

import contextlib
import logging
import queue
import sys
import threading
from logging.handlers import WatchedFileHandler
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter

from penstock.api import metrics
from penstock.gateway.audit.entry import Entry

KEPT = 10_000
"""Lines that wait for the disk at most; what comes then is dropped and counted."""
CLOSE_S = 5.0
"""How long a gateway that goes waits for them."""

log = logging.getLogger(__name__)


class AuditWriter:
    """Writes each line at once. If the file was renamed or removed, it opens a new one (logrotate, without a signal).

    Args:
        path: The file to append to; None: standard output.
        registry: Registry of the counters of lines.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path | None, registry: CollectorRegistry, kept: int = KEPT) -> None:
        self._handler = logging.StreamHandler(sys.stdout) if path is None else WatchedFileHandler(path, encoding="utf-8")
        self._handler.handleError = self._failed
        lines = Counter(metrics.AUDIT_LINES, "Lines of the audit log by outcome", ["outcome"], registry=registry)
        self._written, self._dropped, self._lost = (lines.labels(outcome=word) for word in ("written", "dropped", "failed"))
        self._queue: queue.Queue[Entry | None] = queue.Queue(kept)
        self._trouble = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)

    def start(self) -> None:
        """Begins to write."""
        self._thread.start()

    def write(self, entry: Entry) -> None:
        """Takes one line; never waits."""
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._dropped.inc()

    def close(self) -> None:
        """Writes what waits, for `CLOSE_S` at most."""
        with contextlib.suppress(queue.Full):  # what is left is counted below
            self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if left := self._queue.qsize():
            self._dropped.inc(left)
            log.error("%d lines of the audit log were not written in time", left)

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        while (entry := self._queue.get()) is not None:
            self._emit(encoder.encode(entry).decode())
        with contextlib.suppress(OSError):  # of what could not be flushed, which is counted
            self._handler.close()

    def _emit(self, line: str) -> None:
        self._error = None
        try:
            self._handler.emit(logging.makeLogRecord({"msg": line}))
        except OSError as error:  # the file's folder has gone
            self._error = error
        if self._error is None:
            self._written.inc()
            self._trouble = False
        else:
            self._lost.inc()
            if not self._trouble:
                log.error("the audit log cannot be written: %s", self._error)
            self._trouble = True

    def _failed(self, record: logging.LogRecord) -> None:
        """Keep the error. The standard library's handler would print the record."""
        self._error = sys.exception()
