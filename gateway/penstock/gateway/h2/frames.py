"""HTTP/2 frames as bytes, and the protocol's errors (RFC 9113, sections 4, 6 and 7)."""

import enum
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
MAX_ID = MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
DEFAULT_TABLE_BYTES = 4096
MIN_FRAME_BYTES, MAX_FRAME_BYTES = 16_384, 2**24 - 1

HEAD = struct.Struct(">HBBBI")
"""Length (upper 16 bits, lower 8), type, flags, stream."""
HEAD_BYTES = HEAD.size
_SETTING = struct.Struct(">HI")
_WORD = struct.Struct(">I")


class Code(enum.IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB


class Setting(enum.IntEnum):
    """What SETTINGS can say. Unknown ones are ignored."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6
    NO_RFC7540_PRIORITIES = 0x9


class ConnectionFault(Exception):
    """The peer broke the protocol, or floods us: the connection ends with `code` and the message."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFault(Exception):
    """The peer broke the protocol in one stream, which ends with `code`."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def head(kind: int, flags: int, stream_id: int, size: int) -> bytes:
    """The nine bytes before a payload of `size` bytes."""
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id)


def settings(values: dict[Setting, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Settings and their values, in the frame's order; raises `ConnectionFault` where the frame or a value is out of bounds."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    values: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
    for name, value in values:
        if name == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}")
        if name == Setting.MAX_FRAME_SIZE and not MIN_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")
        if name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
    return values


def rst_stream(stream_id: int, code: Code) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, _WORD.pack(code))


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, _WORD.pack(increment))


def goaway(last_stream_id: int, code: Code, message: str = "") -> bytes:
    """A GOAWAY frame."""
    return frame(GOAWAY, 0, 0, _WORD.pack(last_stream_id) + _WORD.pack(code) + message.encode())


def word(kind: str, payload: bytes) -> int:
    """The one number that RST_STREAM and WINDOW_UPDATE carry."""
    if len(payload) != _WORD.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"{kind} of {len(payload)} bytes")
    return _WORD.unpack(payload)[0]


def unpadded(payload: bytes) -> bytes:
    """The payload of a frame that has the PADDED flag, without the padding; raises `ConnectionFault`."""
    if not payload:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a padded frame without a length of its padding")
    if payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]
