"""Header blocks (HPACK, RFC 7541): read by the `hpack` package and remembered, written as plain literals.

We announce a dynamic table of no size. A peer that has taken that in sends blocks that mean the same wherever they stand, and as
most of a gateway's calls have the same headers, one look into a dictionary reads them. The fields of such a block mean the same
in any block, too: where one differs from call to call, such as `traceparent`, the others are remembered.
"""

import re
from typing import Generic, TypeVar

import msgspec
from hpack import Decoder, HPACKError, OversizedHeaderListError

from penstock.gateway.h2.frames import Code, ConnectionFault
from penstock.gateway.h2.limits import MAX_LIST_BYTES

_CACHED_BLOCKS, _CACHED_FIELDS, _CACHED_BYTES = 256, 1024, 1024
_FIELD_OVERHEAD = 32
"""Bytes that a field counts for besides its name and value (RFC 9113, section 6.5.2)."""
_MOST_FIELDS = MAX_LIST_BYTES // _FIELD_OVERHEAD
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_CONNECTION = {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])")

NO_TABLE = b"\x20"
"""What begins a block by which the dynamic table gets the size of nothing (RFC 7541, section 6.3)."""

Fields = list[tuple[bytes, bytes]]
T = TypeVar("T")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a header block says."""

    fields: tuple[tuple[str, str], ...]
    """Without pseudo-headers."""
    pseudo: dict[str, str]
    first: dict[str, str]
    """The first value of each of `fields`."""
    size: int
    """Bytes, counted as RFC 9113 does."""
    missing: str = ""
    """What a request lacks of the pseudo-headers."""
    malformed: str = ""
    """Why the stream must be reset; empty: it need not."""
    content_length: int | None = None

    def get(self, name: str) -> str | None:
        """The first value of a header."""
        return self.first.get(name)


class Recent(Generic[T]):
    """What the last few distinct bytes mean. What is asked for becomes the newest, so that bytes that never come again push out
    each other alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[bytes, T] = {}

    def get(self, data: bytes) -> T | None:
        """What `data` means, if it is known."""
        meaning = self._known.pop(data, None)
        if meaning is not None:
            self._known[data] = meaning
        return meaning

    def put(self, data: bytes, meaning: T) -> None:
        """Remembers it in place of what was asked for least recently."""
        if len(data) > _CACHED_BYTES:
            return
        if len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[data] = meaning


class BlockCache:
    """The last distinct blocks, and fields of blocks, that depend on no dynamic table. One for all connections."""

    def __init__(self) -> None:
        self.heads = Recent[Head](_CACHED_BLOCKS)
        self.fields = Recent[tuple[bytes, bytes]](_CACHED_FIELDS)


class BlockReader:
    """Reads the blocks of one connection, in the order in which they come."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._decoder = Decoder(max_header_list_size=MAX_LIST_BYTES)

    def read(self, block: bytes) -> Head:
        """What `block` says; raises `ConnectionFault` where that cannot be known."""
        decoder = self._decoder
        stateless = decoder.header_table_size == 0
        if stateless and (known := self._cache.heads.get(block)) is not None:
            return known
        try:
            fields = self._by_field(block) if stateless else None
            head = read_fields(self._decode(block) if fields is None else fields)
        except OversizedHeaderListError:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"headers of more than {MAX_LIST_BYTES} bytes") from None
        except HPACKError:
            # Not in the package's words, which may show where in memory the block lies.
            raise ConnectionFault(Code.COMPRESSION_ERROR, "a header block that cannot be read") from None
        if decoder.header_table_size == 0:
            decoder.max_allowed_table_size = 0  # the peer has obeyed our settings, and may not grow it again
            if stateless:
                self._cache.heads.put(block, head)
        return head

    def _by_field(self, block: bytes) -> Fields | None:
        """The fields of a block, where each can be read by itself; None where the block as a whole has to be."""
        parts = _parts(block)
        if parts is None:
            return None
        fields: Fields = []
        size = 0
        for part in parts:
            field = self._cache.fields.get(part)
            if field is None:
                (field,) = self._decode(part)
                self._cache.fields.put(part, field)
            size += len(field[0]) + len(field[1]) + _FIELD_OVERHEAD
            if size > MAX_LIST_BYTES:
                return None
            fields.append(field)
        return fields

    def _decode(self, block: bytes) -> Fields:
        return [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]  # type: ignore[arg-type]


def _parts(block: bytes) -> list[bytes] | None:
    """The fields of a block, each as its bytes (RFC 7541, section 6); None where one changes the table's size or is cut off, or
    where they are too many for any list."""
    parts: list[bytes] = []
    at, end = 0, len(block)
    while at < end:
        start, first = at, block[at]
        if first & 0xE0 == 0x20:
            return None
        prefix = 0x7F if first & 0x80 else 0x3F if first & 0x40 else 0x0F
        number, at = _number(block, at, prefix)
        if not first & 0x80:  # a literal: its value, after its name where no index says that
            for _ in range(1 if number else 2):
                length, at = _number(block, at, 0x7F)
                at += length
        if at > end or len(parts) >= _MOST_FIELDS:
            return None
        parts.append(block[start:at])
    return parts


def _number(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """The integer at a place and where it ends: past the block where it is cut off or longer than any length of ours."""
    if at >= len(block):
        return 0, len(block) + 1
    number = block[at] & prefix
    at += 1
    if number < prefix:
        return number, at
    for shift in (0, 7, 14):
        if at >= len(block):
            break
        byte = block[at]
        number += (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
    return 0, len(block) + 1


def read_fields(fields: Fields) -> Head:
    """Checks a request's header list, or its trailers, by RFC 9113, section 8."""
    pseudo: dict[str, str] = {}
    regular: list[tuple[str, str]] = []
    malformed, length = "", None
    for name, value in fields:
        if name[:1] == b":":
            if regular or name not in _PSEUDO or name.decode() in pseudo:
                malformed = f"pseudo-header {name!r} unknown, repeated or late"
            pseudo[name.decode("latin-1")] = value.decode("latin-1")
        else:
            if not _NAME.fullmatch(name) or name in _CONNECTION or (name == b"te" and value != b"trailers"):
                malformed = f"header {name!r} is not allowed"
            if name == b"content-length":
                if not value.isdigit() or len(value) > 15 or length not in (None, int(value)):
                    malformed = "content-length is no number, or two"
                else:
                    length = int(value)
            regular.append((name.decode("latin-1"), value.decode("latin-1")))
        if not _VALUE.fullmatch(value):
            malformed = f"header {name!r} has a value that is none"
    missing = ", ".join(name for name in (":method", ":scheme", ":path") if not pseudo.get(name))
    return Head(
        fields=tuple(regular),
        pseudo=pseudo,
        first=dict(reversed(regular)),
        size=sum(len(name) + len(value) + _FIELD_OVERHEAD for name, value in fields),
        missing=missing,
        malformed=malformed,
        content_length=length,
    )


def literal(name: str, value: str) -> bytes:
    """A header field, neither compressed nor indexed."""
    return b"\x00" + _string(name.encode("ascii")) + _string(value.encode("latin-1"))


def _string(text: bytes) -> bytes:
    """A string literal: its length in a 7-bit prefix, and itself."""
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    size -= 127
    length = bytearray((127,))
    while size >= 128:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + text
