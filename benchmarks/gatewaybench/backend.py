"""Engines that answer at once: a process stands for any number of replicas, by whatever address of 127.0.0.0/8 it is called."""

import asyncio
import time

import msgspec
import zmq
import zmq.asyncio
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.gatewaybench.texts import TEMPLATE, checkpoint
from penstock.api import events as wire
from penstock.api import headers, load_report
from penstock.api.events import EventBatch
from penstock.api.load_report import LoadReport
from penstock.prompt.bundle import PromptBundle

WORDS = 97
ANSWER = b'{"id":"x","object":"chat.completion","choices":[]}'
REPORT_EVERY_S = 0.5
REPORT = LoadReport(epoch=1, seq=1, max_num_seqs=256, prefill_tokens_per_s=50_000.0, decode_step_s=0.01)
_FILLER = 'vllm:filler_bucket{engine="0",le="%d",model_name="m"} 1.0\n'
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
METRICS = "".join(_FILLER % n for n in range(500)) + "".join(f'vllm:{name}{{model_name="m"}} 0.0\n' for name in _GAUGES)
"""A page as large as vLLM's: 29 kB."""


class Backend(asyncio.Protocol):
    """Answers each request with what its path asks for. Reads no more of a request than that takes."""

    def __init__(self, pages: dict[bytes, bytes]) -> None:
        self._pages = pages
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take in bytes."""
        self._data += data
        while (end := message_end(self._data)) is not None:
            path = bytes(self._data[:200]).split(b" ", 2)[1]
            del self._data[:end]
            self._transport.write(self._pages[path])


def message_end(data: bytes | bytearray) -> int | None:
    """Where the first HTTP/1.1 message in `data` ends; None while it is incomplete."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return None
    fields = bytes(data[:head]).lower()
    if b"transfer-encoding: chunked" in fields:
        if data.endswith(b"0\r\n\r\n"):
            return len(data)
        return None
    _, found, rest = fields.partition(b"content-length: ")
    end = head + 4 + (int(rest.partition(b"\r\n")[0]) if found else 0)
    return end if len(data) >= end else None


def bundle() -> PromptBundle:
    """What tokenises: a token a word."""
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PromptBundle(
        served_names=("m",),
        tokenizer=tokenizer.to_str(),
        chat_template=TEMPLATE,
        special_tokens={},
        block_size=16,
        hash_seed="bench",
        max_model_len=65_536,
    )


def pages(report: LoadReport = REPORT) -> dict[bytes, bytes]:
    """The answers by path."""
    prompts = checkpoint()
    orca = f"{headers.LOAD}: {load_report.encode(report, 'TEXT')}\r\n"
    return {
        b"/v1/chat/completions": _page(ANSWER, orca),
        b"/metrics": _page(METRICS.encode()),
        b"/load": _page(msgspec.json.encode(report)),
        b"/prompt-bundle": _page(prompts.to_json(), f'etag: "{prompts.digest}"\r\n'),
    }


def _page(body: bytes, fields: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{fields}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve(port: int, *, events: bool, report: LoadReport = REPORT) -> None:
    """Serves HTTP at `port`, which several may share, and with `events` the event stream at the next port and its replay at the
    one after, until it is killed."""
    answers = pages(report)
    server = await asyncio.get_running_loop().create_server(lambda: Backend(answers), "0.0.0.0", port, reuse_port=True)
    if not events:
        return await server.serve_forever()
    context = zmq.asyncio.Context()
    publisher, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    publisher.bind(f"tcp://0.0.0.0:{port + 1}")
    replay.bind(f"tcp://0.0.0.0:{port + 2}")
    await asyncio.gather(server.serve_forever(), _publish(publisher), _replay(replay))
    return None


async def _publish(socket: zmq.asyncio.Socket) -> None:
    """Reports, as engines do that nothing happens to."""
    seq = 0
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        report = msgspec.structs.replace(REPORT, seq=seq + 2)
        payload = wire.encode(EventBatch(epoch=REPORT.epoch, time=time.time(), events=[report]))
        await socket.send_multipart([wire.TOPIC, wire.encode_seq(seq), payload])
        seq += 1


async def _replay(socket: zmq.asyncio.Socket) -> None:
    """Nothing is cached, and nothing was missed."""
    while True:
        caller, *_ = await socket.recv_multipart()
        await socket.send_multipart([caller, wire.END_OF_REPLAY, b""])
