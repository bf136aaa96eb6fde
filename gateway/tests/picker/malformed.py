"""Random connections of a proxy that is broken: valid exchanges of ext_proc, with faults in messages or frames."""

import random
from dataclasses import dataclass, field

import orjson
from hpack import Encoder

from penstock.api import headers
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
)
from penstock.gateway.extproc.service import METHOD, SERVICE
from penstock.gateway.h2 import frames
from penstock.gateway.h2.messages import prefixed

CALL = [
    (":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{METHOD}"), (":authority", "x"),
    ("content-type", "application/grpc"), ("te", "trailers"),
]  # fmt: skip
APART = [(headers.PHASE, headers.REQUEST_PHASE)]
PATHS = ("/v1/chat/completions",) * 6 + ("/v1/completions", "/v1/models", "/v1/embeddings", "/nowhere", "")
PROCESS = "fuzz"
"""What the names of a gateway's bookings begin with."""
ODD = [
    b"", b"[]", b"{", b"nan", b"null", b"\xff\xfe", b'{"model":3}', b'{"model":"m"', b'{"model":"m","messages":' + b"[" * 2_000,
    b'{"model":"m","messages":[{"role":"user"}]}', b'{"model":"m","model":"x","messages":[]}',
    b'{"model":"\\ud800","messages":[]}',
]  # fmt: skip
WORDS = ["the", "river,", "don't", "2024", "état", "вода", "🙂", "<|end|>", '"data:', "\n\n"]


@dataclass
class Said:
    """What a connection says."""

    reads: list[bytes] = field(default_factory=list)
    messages: int = 0
    """How many, of exchanges most of which have a fault."""


def body(rng: random.Random) -> bytes:
    """A chat, mostly."""
    content = " ".join(rng.choices(WORDS, k=rng.choice((0, 1, 5, 40))))
    raw = orjson.dumps(
        {"model": rng.choice(("m", "m", "m", "alias", "free", "no")), "messages": [{"role": "user", "content": content}]}
    )
    match rng.randrange(6):
        case 0:
            return rng.choice(ODD)
        case 1:
            return broken(rng, raw)
        case _:
            return raw


def broken(rng: random.Random, data: bytes) -> bytes:
    """Some of these bytes, or others: bits flip, parts are cut, said twice, changed places, or promise to be huge."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, to = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        match rng.randrange(6):
            case 0 | 1 if data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]
            case 2:
                data = data[:at] + data[to:]
            case 3:
                data = data[:to] + data[at:]
            case 4:
                data = data[to:] + data[at:to] + data[:at]
            case _:
                huge = rng.choice((b"\xff" * 4, b"\xff" * 9 + b"\x01", b"\x80" * 12, b"\x7f\xff\xff\xff", bytes(4)))
                data = data[:at] + huge + data[at + len(huge) :]
    return data


def exchange(rng: random.Random, number: int) -> list[ProcessingRequest]:
    """The messages of a valid one."""
    if rng.random() < 0.2:
        return [response(rng)]
    message, raw = ProcessingRequest(request_headers=HttpHeaders()), body(rng)
    fields = {
        ":method": rng.choice(("POST", "POST", "POST", "GET")),
        ":path": rng.choice(PATHS),
        headers.REQUEST_ID: f"r-{number}",
    }
    for name, value in fields.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.protocol_config.request_body_mode = rng.choice(
        [ProcessingMode.FULL_DUPLEX_STREAMED] * 5 + [ProcessingMode.BUFFERED, 0]
    )
    message.request_headers.end_of_stream = rng.random() < 0.05
    at = rng.randrange(len(raw) + 1)
    first, last = HttpBody(body=raw[:at]), HttpBody(body=raw[at:], end_of_stream=True)
    chunks = [ProcessingRequest(request_body=first), ProcessingRequest(request_body=last)] if rng.random() < 0.3 else [
        ProcessingRequest(request_body=HttpBody(body=raw, end_of_stream=True))
    ]  # fmt: skip
    return [message, *chunks, *([ProcessingRequest(request_trailers=HttpTrailers())] if rng.random() < 0.1 else [])]


def response(rng: random.Random) -> ProcessingRequest:
    """A head of a response, perhaps to a request that was sent on."""
    message = ProcessingRequest(response_headers=HttpHeaders(), observability_mode=rng.random() < 0.8)
    fields = {
        ":status": rng.choice(("200", "200", "503", "x", "")),
        "content-type": rng.choice(("application/json", "text/event-stream")),
    }
    for name, value in fields.items():
        message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    name = f"{PROCESS}-{rng.randrange(200):x}"
    message.metadata_context.filter_metadata[headers.LOG_NAMESPACE].update({headers.BOOKING: name, "model": "m"})
    message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "10.0.0.1:8000"})
    return message


def stream(rng: random.Random, number: int) -> tuple[list[bytes], int]:
    """What a stream says, message by message, and how many of those have a fault."""
    said = [it.SerializeToString() for it in exchange(rng, number)]
    match rng.randrange(5):
        case 0:
            rng.shuffle(said)
        case 1:
            said.insert(rng.randrange(len(said) + 1), rng.choice(said))
        case 2:
            said.pop(rng.randrange(len(said)))
        case _:
            said = [broken(rng, it) if rng.random() < 0.6 else it for it in said]
    said = [prefixed(it) for it in said]
    if rng.random() < 0.15:
        at = rng.randrange(len(said) + 1)
        said[at:at] = [rng.choice((b"\0\xff\xff\xff\xff", b"\1\0\0\0\0", b"\0\0\0\0\0", b"\0\0\0\0\x09", b"\2"))]
    return said, max(len(said), 1)


def connection(rng: random.Random) -> Said:
    """A few streams that take turns; on every third connection frames have faults, too."""
    encoder = Encoder()
    encoder.header_table_size = 0
    said, waiting = Said([frames.PREFACE + frames.settings({})]), dict[int, list[bytes]]()
    torn = rng.random() < 0.3
    for n in range(rng.choice((1, 4, 8, 16))):
        data, count = stream(rng, n)
        said.messages += count
        call = rng.choice([CALL + APART] * 6 + [CALL, CALL[:4], CALL[:2] + CALL[3:], [*CALL, ("grpc-encoding", "gzip")]])
        waiting[2 * n + 1] = [frames.frame(frames.HEADERS, frames.END_HEADERS, 2 * n + 1, encoder.encode(call)), *(
            frames.frame(frames.DATA, frames.END_STREAM if rng.random() < 0.1 else 0, 2 * n + 1, it) for it in data
        )]  # fmt: skip
        if rng.random() < 0.2:
            waiting[2 * n + 1].append(frames.rst_stream(2 * n + 1, frames.Code.CANCEL))
    line, begun = list[bytes](), set[int]()
    while waiting:
        which = rng.choice([*(it for it in waiting if it in begun), *([it for it in waiting if it not in begun][:1])])
        begun.add(which)
        line.append(waiting[which].pop(0))
        if not waiting[which]:
            del waiting[which]
    # Of what comes in one read the forms may take in one thing before or after another, as two streams, or a stream and what
    # breaks it. So each frame is a read or more, but where there is one stream, and nothing comes after its end.
    ended = any(it[3] == frames.DATA and it[4] & frames.END_STREAM for it in line[:-1])
    data = b"".join(torn_up(rng, line) if torn else line)
    whole = [data] if len(begun) == 1 and not torn and not ended else framed(data)
    said.reads += [piece for it in whole for piece in cut(rng, it)]
    return said


def torn_up(rng: random.Random, line: list[bytes]) -> list[bytes]:
    """Frames of which some are broken, said twice or not at all, and some were never asked for."""
    reads = list[bytes]()
    for it in line:
        match rng.randrange(12):
            case 0:
                reads.append(broken(rng, it))
            case 1:
                reads += [it, it]
            case 2:
                reads.append(
                    frames.frame(rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 3, 2**31 - 1)), rng.randbytes(8))
                )
            case 3:
                pass
            case _:
                reads.append(it)
    return reads


def framed(data: bytes) -> list[bytes]:
    """The frames that these bytes are, by the lengths that they tell, and what is none."""
    found, at = list[bytes](), 0
    while at < len(data):
        end = at + frames.HEAD_BYTES + int.from_bytes(data[at : at + 3])
        found.append(data[at:end])
        at = end
    return found


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """These bytes, or pieces of them."""
    size = rng.choice((50, 300, 2_000, 60_000, 60_000, 60_000))
    return [data[at : at + size] for at in range(0, len(data), size)]
