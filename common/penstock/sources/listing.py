"""What a source holds, and what every kind of source can do."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Protocol

from penstock.sources.errors import SourceError

WANTED: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
"""What serving reads; pickled weights and other frameworks' copies are not even fetched."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a source."""

    path: str
    """Below the model's folder, with `/`."""
    size: int
    """Bytes."""
    digest: str | None
    """`sha256:…`, `git:…` (Git's name of the blob) or `md5:…`; None: the source says none."""
    version: str = ""
    """The source's own mark of this content, such as an ETag."""


@dataclass(frozen=True)
class Listing:
    """One version of a model."""

    version: str
    """A commit, or a hash of all that is there: other content has another one."""
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Source(Protocol):
    """Files elsewhere. All methods raise SourceError; `read` may be called by several threads."""

    uri: str

    def folder(self, version: str) -> str:
        """The name of the folder that holds this version."""
        ...

    def resolve(self) -> Listing:
        """What is there now."""
        ...

    def read(self, listing: Listing, file: RemoteFile, start: int, size: int) -> bytes:
        """`size` bytes of the file from byte `start`."""
        ...

    def vouches(self, file: RemoteFile) -> bool:
        """Whether the file's digest is one of its content, asked when it differs."""
        ...


def wanted(uri: str, files: Iterable[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Return the files that serving reads, sorted by path.

    Raises:
        SourceError: There are none, or a path leads out of the folder.
    """
    chosen = sorted((it for it in files if any(fnmatch.fnmatch(it.path, one) for one in WANTED)), key=lambda it: it.path)
    if not chosen:
        raise SourceError("NotFound", f"{uri}: holds no file of a model ({', '.join(WANTED)})")
    for file in chosen:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or path.parts[0].startswith(".penstock"):
            raise SourceError("InvalidSource", f"{uri}: {file.path!r} is no path below a folder")
    return tuple(chosen)
