"""What the scheduler's half of the disk tier asks of a rank, and what it hears back."""

from typing import Literal

import msgspec

_BLOCK = 4096
"""Files are read and written past the page cache: in whole blocks."""


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One page, between a slot of the host's memory and its file."""

    number: int
    """Number by which its end is reported."""
    action: Literal["write", "read", "delete"]
    group: int
    block_hash: bytes
    slot: int = -1


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """How a move has ended on one rank."""

    seconds: float
    error: str | None = None
    """Why the file was not written, or the slot does not have the page."""


class PageFile(msgspec.Struct, frozen=True, array_like=True):
    """A page that was on the disk when the folder was opened."""

    group: int
    block_hash: bytes


def file_bytes(page_bytes: int) -> int:
    """Return the size of a page's file: a header block, and the page."""
    return _BLOCK * (1 + -(-page_bytes // _BLOCK))


def header_bytes() -> int:
    """Return the offset of the page in its file."""
    return _BLOCK
