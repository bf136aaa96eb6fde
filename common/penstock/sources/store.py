"""A folder of models, such as a volume that many pods mount. A model's folder is there whole or not at all.

NAME/                        a model; NAME says source and version
NAME/.penstock-model.json    the marker: where it came from, its files' sizes and sha256
.penstock/NAME/              one on its way: files/, parts/
.penstock/NAME.lock          who brings it
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.sources.listing import Listing, Source
from penstock.sources.lock import Lock
from penstock.sources.parts import Parts, write_error
from penstock.sources.progress import Progress

MARKER: Final = ".penstock-model.json"


@dataclass(frozen=True)
class Fetched:
    """A model that is there."""

    folder: str
    """Name of the model's folder in the store."""
    version: str
    """A commit of the Hub, or a hash of what a bucket held."""
    size: int
    """Bytes."""


class Store:
    """Models below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def fill(self, source: Source, progress: Progress) -> Fetched:
        """Brings the source's present version here unless it is here; one of several callers does, the others wait.

        Raises:
            SourceError: See its reasons.
        """
        listing = source.resolve()
        name = source.folder(listing.version)
        fetched = Fetched(name, listing.version, listing.size)
        staging = self.root / ".penstock" / name
        try:
            if self._there(name, listing):
                return fetched
            staging.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.root / ".penstock" / f"{name}.lock")
            lock.acquire(lambda owner: progress.enter("waiting", listing.size, owner))
        except OSError as error:
            raise write_error(source.uri, error) from error
        try:
            if not self._there(name, listing):
                self._bring(source, listing, staging, lock, progress)
        except OSError as error:
            raise write_error(source.uri, error) from error
        finally:
            lock.release()
        progress.enter("done", listing.size)
        progress.add(listing.size)
        return fetched

    def _bring(self, source: Source, listing: Listing, staging: Path, lock: Lock, progress: Progress) -> None:
        staging.mkdir(parents=True, exist_ok=True)  # who held the lock before may have removed it
        parts = Parts(source, listing, staging, progress, lock.check)
        digests = parts.run()
        files = {it.path: {"size": it.size, "digest": digests[it.path]} for it in listing.files}
        marker = {"source": source.uri, "version": listing.version, "files": files}
        (parts.files / MARKER).write_text(json.dumps(marker, indent=1))
        lock.check()
        target = self.root / source.folder(listing.version)
        if target.exists():  # broken: `_there` said so
            shutil.rmtree(target)
        parts.files.rename(target)
        shutil.rmtree(staging, ignore_errors=True)

    def _there(self, name: str, listing: Listing) -> bool:
        """Whether it is whole, as far as names and sizes tell."""
        folder = self.root / name
        try:
            files = json.loads((folder / MARKER).read_text())["files"]
            sizes = {path: (folder / path).stat().st_size for path in files}
        except (FileNotFoundError, ValueError):
            return False
        return sizes == {it.path: it.size for it in listing.files}
