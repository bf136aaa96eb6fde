"""Pages in files, on one rank: written beside and renamed, checked when they are read.

A file that is damaged or gone is a page that is not there.
"""

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.engine.config import ConfigError
from penstock.engine.connectors.moves import Move, PageFile, file_bytes, header_bytes, page_name, page_of
from penstock.engine.connectors.namespace import Namespace
from penstock.engine.connectors.page_mover import PageMover, page_header

THREADS = 4
SUFFIX: Final = ".page"
_ABANDONED_S = 600.0
"""Age in seconds at which an unfinished file counts as abandoned: its writer is gone."""

_log = logging.getLogger(__name__)


class PageFiles(PageMover):
    """The files of one namespace.

    Args:
        root: `--kv-offload-directory`.
        namespace: Names the folder below it.
        slots: [slots, bytes of a page] of the host's memory.
        disk_bytes: That each rank gives to files.
        ranks: On this machine.
        keepers: Those of them that have files.

    Raises:
        ConfigError: The folder cannot be used, or there is no room for the files.
    """

    def __init__(
        self, root: Path, namespace: Namespace, slots: npt.NDArray[np.uint8], disk_bytes: int, ranks: int = 1, keepers: int = 1
    ) -> None:
        super().__init__(slots, {"write": self._write, "read": self._read, "delete": self._delete}, THREADS, "pages")
        self._folder = root / namespace.name
        self._size = file_bytes(slots.shape[1])
        self._local = threading.local()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._direct = os.O_DIRECT if self._takes_direct() else 0
            (self._folder / "about.json").write_bytes(namespace.description)
            self.found = self._scan()
            there = os.statvfs(self._folder)
        except OSError as error:
            raise ConfigError(f"--kv-offload-directory {root} cannot be used: {error.strerror} ({error.filename})") from error
        free, ours = there.f_bavail * there.f_frsize, keepers * len(self.found) * self._size
        if ranks * disk_bytes > free + ours:
            raise ConfigError(
                f"--kv-offload-disk-bytes {disk_bytes} does not fit into {root}: {ranks * disk_bytes:,} bytes for {ranks} ranks, "
                f"and {free:,} are free beside {ours:,} of pages that are there"
            )
        how = "past the page cache" if self._direct else "through the page cache: its file system has no direct I/O"
        _log.info("KV pages in %s: %d found; written %s", self._folder, len(self.found), how)

    def _path(self, move: Move) -> Path:
        name = page_name(move)
        return self._folder / name[:2] / f"{name}{SUFFIX}"

    def _buffer(self) -> mmap.mmap:
        """The thread's own, aligned as direct I/O wants it."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = mmap.mmap(-1, self._size)
        return self._local.buffer

    def _write(self, move: Move) -> None:
        path, buffer = self._path(move), self._buffer()
        page = memoryview(buffer)[header_bytes() : header_bytes() + self.slots.shape[1]]
        page[:] = self.slots[move.slot].data
        header = page_header(move, page)
        buffer[: len(header)] = header
        path.parent.mkdir(mode=0o700, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | self._direct, 0o600)
            try:
                if os.write(fd, buffer) < self._size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            finally:
                os.close(fd)
            beside.rename(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def _read(self, move: Move) -> None:
        path, buffer = self._path(move), self._buffer()
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | self._direct)
        try:
            size = os.readv(fd, [buffer])
        finally:
            os.close(fd)
        page = memoryview(buffer)[header_bytes() : header_bytes() + self.slots.shape[1]]
        header = page_header(move, page)
        if size != self._size or buffer[: len(header)] != header:
            path.unlink(missing_ok=True)
            raise ValueError(f"{path} is damaged: it was removed")
        self.slots[move.slot] = np.frombuffer(page, np.uint8)
        os.utime(path)  # the order in which a restart finds pages is that of their last use

    def _delete(self, move: Move) -> None:
        self._path(move).unlink(missing_ok=True)

    def _takes_direct(self) -> bool:
        """Whether the file system lets files be written past the page cache; also whether they can be written at all."""
        probe, block = self._folder / f"probe.{os.getpid()}.part", mmap.mmap(-1, header_bytes())
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            for direct in (os.O_DIRECT, 0):
                try:
                    fd = os.open(probe, flags | direct, 0o600)
                    try:
                        os.write(fd, block)
                    finally:
                        os.close(fd)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                else:
                    return bool(direct)
        finally:
            probe.unlink(missing_ok=True)
        return False

    def _scan(self) -> list[PageFile]:
        """Pages that are there, the least recently used first; what a dead process has begun is removed."""
        found: list[tuple[float, PageFile]] = []
        for entry in (entry for folder in os.scandir(self._folder) if folder.is_dir() for entry in os.scandir(folder.path)):
            with contextlib.suppress(FileNotFoundError):  # another replica evicts
                status = entry.stat()
                page = page_of(entry.name.removesuffix(SUFFIX))
                if page is not None and status.st_size == self._size:
                    found.append((status.st_mtime, page))
                elif page is not None or time.time() - status.st_mtime > _ABANDONED_S:
                    Path(entry.path).unlink()
        return [page for _, page in sorted(found, key=lambda it: it[0])]
