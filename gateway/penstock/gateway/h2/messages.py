"""gRPC over HTTP/2: messages with a length before them, and what headers and trailers say."""

import re
import zlib
from urllib.parse import quote

import grpc

from penstock.gateway.h2.blocks import Head, literal

PREFIX_BYTES = 5
ENCODINGS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}
"""Message encodings, with zlib's parameter for each."""
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_STATUS_200 = b"\x88"
RESPONSE_HEAD = (
    _STATUS_200
    + literal("content-type", "application/grpc")
    + literal("grpc-accept-encoding", ", ".join(("identity", *ENCODINGS)))
)


class CallFault(Exception):
    """The call ends with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Compressed(bytes):
    """A message as it came, to be read by `Assembler.expanded`."""


class Assembler:
    """Makes messages of the bytes of a stream, however they are cut.

    Args:
        max_bytes: The largest message.
        encoding: By what the caller compresses messages, as it says; None where it does not.
    """

    __slots__ = ("_buffer", "_encoding", "_max_bytes")

    def __init__(self, max_bytes: int, encoding: str | None = None) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes
        self._encoding = encoding

    @property
    def partial(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes; raises `CallFault`."""
        size = len(data) - PREFIX_BYTES
        if not self._buffer and 0 <= size <= self._max_bytes and data[:PREFIX_BYTES] == b"\0" + size.to_bytes(4):
            return [data[PREFIX_BYTES:]]  # what nearly always comes
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < PREFIX_BYTES + self._size(self._buffer, 0):
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        messages: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= PREFIX_BYTES:
            stop = at + PREFIX_BYTES + self._size(data, at)
            if stop > end:
                break
            message = data[at + PREFIX_BYTES : stop]
            messages.append(Compressed(message) if data[at] else message)
            at = stop
        if at < end:
            self._buffer += data[at:]
        return messages

    def _size(self, data: bytes | bytearray, at: int) -> int:
        """The size that the prefix at `at` says; that of no message while the prefix is incomplete."""
        if len(data) - at < PREFIX_BYTES:
            return 0
        if data[at]:
            self._may_be_compressed(data[at])
        size = int.from_bytes(data[at + 1 : at + PREFIX_BYTES])
        if size > self._max_bytes:
            raise CallFault(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of {size} bytes; {self._max_bytes} are taken")
        return size

    def _may_be_compressed(self, flag: int) -> None:
        """See gRPC's document on compression."""
        if flag > 1:
            raise CallFault(grpc.StatusCode.INTERNAL, f"a message that begins with {flag}: neither plain nor compressed")
        if self._encoding in (None, "identity"):
            raise CallFault(grpc.StatusCode.INTERNAL, "a compressed message, and no grpc-encoding that says how")
        if self._encoding not in ENCODINGS:
            raise CallFault(grpc.StatusCode.UNIMPLEMENTED, f"messages compressed by {self._encoding} are not taken")

    def expanded(self, message: Compressed) -> bytes:
        """What was compressed; raises `CallFault`. Not before it is read, so that what waits is as large as it came."""
        reader = zlib.decompressobj(ENCODINGS[self._encoding or ""])
        try:
            plain = reader.decompress(message, self._max_bytes + 1)
        except zlib.error as error:
            raise CallFault(grpc.StatusCode.INTERNAL, f"a message that is no {self._encoding}: {error}") from None
        if len(plain) > self._max_bytes:
            details = f"a message of more than {self._max_bytes} bytes when expanded"
            raise CallFault(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        if not reader.eof:
            raise CallFault(grpc.StatusCode.INTERNAL, f"a message that is not all of its {self._encoding}")
        return plain


def refusal(head: Head) -> bytes | None:
    """The block that answers a request that is no gRPC call, in plain HTTP; None for one that is."""
    kind = head.get("content-type") or ""
    if head.pseudo[":method"] != "POST":
        return literal(":status", "405") + literal("allow", "POST")
    if kind != "application/grpc" and not kind.startswith(("application/grpc+", "application/grpc;")):
        return literal(":status", "415")
    return None


def timeout_s(head: Head) -> float | None:
    """Seconds that the caller gives the call; None for ever; raises `CallFault`."""
    text = head.get("grpc-timeout")
    if text is None:
        return None
    parts = _TIMEOUT.fullmatch(text)
    if parts is None:
        raise CallFault(grpc.StatusCode.INTERNAL, f"grpc-timeout {text!r} is no time")
    return int(parts[1]) * _UNITS[parts[2]]


def prefixed(message: bytes) -> bytes:
    """A message as it goes over the wire."""
    return b"\0" + len(message).to_bytes(4) + message


def trailers(code: grpc.StatusCode, details: str, *, alone: bool) -> bytes:
    """The block that ends a call; `alone`: it is the whole answer."""
    number: int = code.value[0]  # type: ignore[attr-defined] - a pair of number and name
    block = literal("grpc-status", str(number))
    if details:
        block += literal("grpc-message", quote(details[:1000], safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"))
    return RESPONSE_HEAD + block if alone else block


OK, OK_ALONE = (trailers(grpc.StatusCode.OK, "", alone=alone) for alone in (False, True))
