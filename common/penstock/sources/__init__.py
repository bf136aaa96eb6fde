"""Sources of models: `hf://`, `s3://`, `pvc://`, `file://` and plain paths, and their download.

Light to import: a client library is loaded with the first source that needs it.
"""

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from penstock.sources.bucket import Bucket
from penstock.sources.errors import PERMANENT, SourceError
from penstock.sources.hub import Hub
from penstock.sources.progress import Progress, Snapshot
from penstock.sources.store import Fetched, Store

__all__ = ["PERMANENT", "Fetched", "Progress", "Snapshot", "SourceError", "fetch", "local_folder", "resolved_version"]

KNOWN: Final = "a path, file://, hf://, s3://"
_BARE: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""`org/name`, as the Hub's pages show it."""


def fetch(uri: str, to: Path, revision: str | None = None, progress: Progress | None = None) -> Fetched:
    """Brings a model into a folder of models (see `Store`), unless it is there.

    Raises:
        SourceError: It cannot be had.
    """
    return Store(to).fill(_remote(uri, revision), progress or Progress())


def resolved_version(uri: str, revision: str | None = None) -> str:
    """The commit that a revision names now, or the hash of what a bucket holds; raises SourceError."""
    return _remote(uri, revision).resolve().version


def local_folder(uri: str, revision: str | None = None) -> Path:
    """The folder of a model on this machine. What comes from the Hub is kept in Hugging Face's own cache, the rest in
    `$XDG_CACHE_HOME/penstock/models`.

    Args:
        uri: A path, `file://` and a path, `hf://org/name` or `s3://bucket/path`. Relative paths begin at the working directory.
            `org/name` is a model of the Hub where there is no such folder.
        revision: Branch, tag or commit on the Hub.

    Raises:
        SourceError: There is no such folder, the server does not give it, or the scheme is unknown.
    """
    scheme, separator, _ = uri.partition("://")
    if separator and scheme == "hf":
        return Hub(uri, revision).cached()
    if separator and scheme == "s3":
        store = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock/models"
        return store / fetch(uri, store, revision).folder
    if separator and scheme == "pvc":
        raise SourceError("InvalidSource", f"{uri!r}: claims are mounted by Kubernetes; give the path where this one is")
    if separator and scheme != "file":
        raise SourceError("InvalidSource", f"{uri!r}: unknown scheme {scheme!r} (known: {KNOWN})")
    path = _path(uri) if separator else Path(uri)
    if not separator and not path.exists() and _BARE.fullmatch(uri):
        return _of_hub(uri, revision)
    _no_revision(uri, revision)
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise SourceError("NotFound", f"{uri!r}: {path.absolute()} {state}")
    return path.resolve()


def _of_hub(name: str, revision: str | None) -> Path:
    try:
        return Hub(f"hf://{name}", revision).cached()
    except SourceError as error:
        raise SourceError(error.reason, f"{name!r}: there is no such folder here, and {error}") from error


def _remote(uri: str, revision: str | None) -> Hub | Bucket:
    if uri.startswith("hf://"):
        return Hub(uri, revision)
    if uri.startswith("s3://"):
        _no_revision(uri, revision)
        return Bucket(uri)
    raise SourceError("InvalidSource", f"{uri!r}: only hf:// and s3:// are fetched; the rest is where it is")


def _no_revision(uri: str, revision: str | None) -> None:
    if revision is not None:
        raise SourceError("InvalidSource", f"{uri!r}: a revision ({revision!r}) belongs to hf:// alone; nothing else has one")


def _path(uri: str) -> Path:
    """Return the path of `file:///absolute` or, as people write it, `file://relative/to/the/working/directory`."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path if parts.netloc in ("", "localhost") else parts.netloc + parts.path))
