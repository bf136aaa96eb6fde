"""Namespaces of pages: the name of the folder in which one rank keeps its pages.

All that determines a page's bytes is part of the name, so replicas with other weights or dtypes can share a disk.
"""

import hashlib
import json
import os
from pathlib import Path

import msgspec

from penstock.engine.cache.pages import PageGeometry, PageIdentity

_SAMPLE = 4096


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for a page to be of use."""

    version: str
    """Version of Penstock. Another version may compute other keys and values."""
    hash_seed: str
    """Seed of the pages' names."""
    identity: PageIdentity
    geometry: PageGeometry

    @property
    def description(self) -> bytes:
        """Return the namespace as JSON, for people."""
        return msgspec.json.format(msgspec.json.encode(self))

    @property
    def name(self) -> str:
        """Name of the folder."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]


def weights_digest(folder: Path) -> str:
    """Return a digest of a checkpoint: its configuration, and of each tensor the name, the shape and three samples.

    A digest of all bytes would take as long as loading them. Training changes a tensor everywhere, so samples show it.
    """
    state = hashlib.sha256()
    for file in sorted(folder.glob("*.json")):
        state.update(f"{file.name}\0".encode() + file.read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = int.from_bytes(os.pread(fd, 8, 0), "little")
            header = os.pread(fd, size, 8)
            state.update(f"{file.name}\0".encode() + header)
            for name, tensor in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    for at in (begin, (begin + end) // 2, max(begin, end - _SAMPLE)):
                        state.update(os.pread(fd, min(_SAMPLE, end - at), 8 + size + at))
        finally:
            os.close(fd)
    return state.hexdigest()
