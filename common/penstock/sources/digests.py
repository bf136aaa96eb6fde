"""Whether a file is what its source says."""

import hashlib
from collections.abc import Callable
from pathlib import Path

_CHUNK = 4 << 20


def digests(path: Path, also: str | None, alive: Callable[[], None]) -> tuple[str, str | None]:
    """(`sha256:…` of a file, the same file's digest of the kind that `also` is of).

    Args:
        also: A digest as a `RemoteFile` has it.
        alive: Called now and then; it may raise.

    Raises:
        OSError: The file cannot be read.
    """
    kind = (also or "").partition(":")[0]
    sha256 = hashlib.sha256()
    other = None
    if kind == "git":
        other = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    elif kind == "md5":
        other = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            sha256.update(chunk)
            if other is not None:
                other.update(chunk)
            alive()
    own = f"sha256:{sha256.hexdigest()}"
    if kind == "sha256":
        return own, own
    return own, f"{kind}:{other.hexdigest()}" if other is not None else None
