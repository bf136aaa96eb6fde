"""Downloads the files of a listing in parts, several at once, and goes on where an earlier process stopped.

Beside the files lies a journal for each: a line for every part that has been written. A file is whole when its digest says so.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from penstock.sources.digests import digests
from penstock.sources.errors import SourceError
from penstock.sources.listing import Listing, RemoteFile, Source
from penstock.sources.progress import Progress

PART: Final = 16 << 20
"""Bytes of one request."""
AT_ONCE: Final = 8
"""Requests; as many parts are in memory."""
TRIES: Final = 6
_ROOM: Final = 16 << 20
"""Bytes that must stay free."""


class Parts:
    """One listing on its way into one folder."""

    def __init__(self, source: Source, listing: Listing, staging: Path, progress: Progress, alive: Callable[[], None]) -> None:
        """
        Args:
            staging: Folder of this version alone; `files` in it becomes the model.
            alive: Called before each part; it raises where this process is to stop.
        """
        self._source, self._listing = source, listing
        self.files = staging / "files"
        self._journals = staging / "parts"
        self._progress, self._alive = progress, alive

    def run(self) -> dict[str, str]:
        """Brings every file, and returns the `sha256:…` of each by path.

        Raises:
            SourceError: A part cannot be had, there is no room, or a file is not what the source says; what is there stays for
                the next try, but for that file.
        """
        todo = {file: self._missing(file) for file in self._listing.files}
        missing = sum(size for parts in todo.values() for _, size in parts)
        self._progress.enter("downloading", self._listing.size)
        self._progress.add(self._listing.size - missing)
        self._check_room(missing)
        self._all(
            [
                lambda file=file, start=start, size=size: self._part(file, start, size)
                for file in todo
                for start, size in todo[file]
            ]
        )
        self._progress.enter("verifying", self._listing.size)
        return {file.path: self._verified(file) for file in self._listing.files}

    def _missing(self, file: RemoteFile) -> list[tuple[int, int]]:
        """(start, size) of the parts that are not there."""
        path, journal = self.files / file.path, self._journals / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        journal.parent.mkdir(parents=True, exist_ok=True)
        # A line without its end was being written when the process was killed.
        lines = journal.read_text().split("\n")[:-1] if journal.exists() and path.exists() else []
        there = {int(line) for line in lines if line.isdecimal()}
        if not there:
            path.write_bytes(b"")
            journal.write_text("")
        return [(it, min(PART, file.size - it)) for it in range(0, file.size, PART) if it not in there]

    def _check_room(self, missing: int) -> None:
        free = shutil.disk_usage(self.files).free
        if missing and missing + _ROOM > free:
            raise SourceError(
                "NoSpace",
                f"{self._source.uri}: {gib(missing)} are still to come and the volume has {gib(free)} free; enlarge or clean it",
            )

    def _all(self, work: Iterable[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            futures: list[Future[None]] = [pool.submit(one) for one in work]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # also where a signal ends it: what is on its way comes, and no more
                pool.shutdown(cancel_futures=True)
        for future in done:
            future.result()

    def _part(self, file: RemoteFile, start: int, size: int) -> None:
        data = self._read(file, start, size)
        try:
            descriptor = os.open(self.files / file.path, os.O_WRONLY)
            try:
                written = 0
                while written < size:
                    written += os.pwrite(descriptor, memoryview(data)[written:], start + written)
            finally:
                os.close(descriptor)
            with (self._journals / file.path).open("a") as journal:
                journal.write(f"{start}\n")
        except OSError as error:
            raise write_error(self._source.uri, error) from error
        self._progress.add(size)

    def _read(self, file: RemoteFile, start: int, size: int) -> bytes:
        for number in range(TRIES):
            self._alive()
            try:
                data = self._source.read(self._listing, file, start, size)
                if len(data) == size:
                    return data
                problem = SourceError("Unreachable", f"{self._source.uri} {file.path}: {len(data)} bytes came instead of {size}")
            except SourceError as error:
                if error.reason != "Unreachable":
                    raise
                problem = error
            if number == TRIES - 1:
                raise problem
            time.sleep(min(0.25 * 2**number, 5.0))
        raise AssertionError("every try returns or raises")

    def _verified(self, file: RemoteFile) -> str:
        path = self.files / file.path
        own, said = digests(path, file.digest, self._alive)
        if path.stat().st_size != file.size or (said != file.digest and self._source.vouches(file)):
            (self._journals / file.path).unlink()
            path.unlink()
            raise SourceError(
                "ChecksumMismatch", f"{self._source.uri} {file.path}: what came has not the source's digest {file.digest}"
            )
        self._progress.add(file.size)
        return own


def write_error(uri: str, error: OSError) -> SourceError:
    """Why the volume does not take a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SourceError("NoSpace", f"{uri}: the volume is full ({error.strerror}); enlarge or clean it")
    return SourceError("NotWritable", f"{uri}: {error}")


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
