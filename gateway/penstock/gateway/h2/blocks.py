"""Header blocks (HPACK, RFC 7541): read by the `hpack` package and remembered, written as plain literals.

We announce a dynamic table of no size. A peer that has taken that in sends blocks that mean the same wherever they stand, and as
most of a gateway's calls have the same headers, one look into a dictionary reads them.
"""

import re

import msgspec
from hpack import Decoder, HPACKError, OversizedHeaderListError

from penstock.gateway.h2.frames import Code, ConnectionFault
from penstock.gateway.h2.limits import MAX_LIST_BYTES

_CACHED_BLOCKS, _CACHED_BYTES = 256, 1024
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_CONNECTION = {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])")

NO_TABLE = b"\x20"
"""What begins a block by which the dynamic table gets the size of nothing (RFC 7541, section 6.3)."""

Fields = list[tuple[bytes, bytes]]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a header block says."""

    fields: tuple[tuple[str, str], ...]
    """Without pseudo-headers."""
    pseudo: dict[str, str]
    first: dict[str, str]
    """The first value of each of `fields`."""
    missing: str = ""
    """What a request lacks of the pseudo-headers."""
    malformed: str = ""
    """Why the stream must be reset; empty: it need not."""
    content_length: int | None = None

    def get(self, name: str) -> str | None:
        """The first value of a header."""
        return self.first.get(name)


class BlockCache:
    """The last distinct blocks that depend on no dynamic table, with what they say. One for all connections."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}

    def get(self, block: bytes) -> Head | None:
        """What `block` says, if it is known."""
        return self._heads.get(block)

    def put(self, block: bytes, head: Head) -> None:
        """Remembers it in place of the oldest."""
        if len(block) > _CACHED_BYTES:
            return
        if len(self._heads) >= _CACHED_BLOCKS:
            del self._heads[next(iter(self._heads))]
        self._heads[block] = head


class BlockReader:
    """Reads the blocks of one connection, in the order in which they come."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._decoder = Decoder(max_header_list_size=MAX_LIST_BYTES)

    def read(self, block: bytes) -> Head:
        """What `block` says; raises `ConnectionFault` where that cannot be known."""
        decoder = self._decoder
        stateless = decoder.header_table_size == 0
        if stateless and (known := self._cache.get(block)) is not None:
            return known
        try:
            head = read_fields(list(decoder.decode(block, raw=True)))  # type: ignore[arg-type] - raw: pairs of bytes
        except OversizedHeaderListError:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"headers of more than {MAX_LIST_BYTES} bytes") from None
        except HPACKError as error:
            # Not in the package's words, which may show where in memory the block lies.
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"a header block that cannot be read: {type(error).__name__}") from None
        if decoder.header_table_size == 0:
            decoder.max_allowed_table_size = 0  # the peer has obeyed our settings, and may not grow it again
            if stateless:
                self._cache.put(block, head)
        return head


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
