"""What the scheduler's half of a disk, a shared store or an object store asks of a rank, and what it hears back."""

import re
from typing import Final, Literal

import msgspec

_GROUP_BYTES: Final = 4
_NAME: Final = re.compile(r"(?:[0-9a-f]{2}){5,}")
_BLOCK = 4096
"""Files are read and written past the page cache: in whole blocks."""


Lower = Literal["disk", "store", "object"]
"""What can lie behind the host's memory, in the order in which it is asked."""


class PageFile(msgspec.Struct, frozen=True, array_like=True):
    """A page that is there."""

    group: int
    block_hash: bytes


def page_name(page: "PageFile | Move") -> str:
    """Return the name of a page's file or object: its hash, and its group as four bytes (big-endian), in hexadecimal."""
    return (page.block_hash + page.group.to_bytes(_GROUP_BYTES, "big")).hex()


def page_of(name: str) -> PageFile | None:
    """Return the page of that name; None: it is no page's."""
    if _NAME.fullmatch(name) is None:
        return None
    named = bytes.fromhex(name)
    return PageFile(int.from_bytes(named[-_GROUP_BYTES:], "big"), named[:-_GROUP_BYTES])


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One page, between a slot of the host's memory and its file or object; or a look at what others have stored."""

    number: int
    """Number by which its end is reported."""
    action: Literal["write", "read", "delete", "list", "find"]
    """`list` looks at all that is there, `find` for the `pages`."""
    group: int = 0
    block_hash: bytes = b""
    slot: int = -1
    pages: list[PageFile] = []


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """How a move has ended on one rank."""

    seconds: float
    error: str | None = None
    """Why the file was not written, or the slot does not have the page."""
    found: list[PageFile] = []
    """Pages that a look has found; those of a `list` the least recently stored first."""


def file_bytes(page_bytes: int) -> int:
    """Return the size of a page's file: a header block, and the page."""
    return _BLOCK * (1 + -(-page_bytes // _BLOCK))


def header_bytes() -> int:
    """Return the offset of the page in its file."""
    return _BLOCK
