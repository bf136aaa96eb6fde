"""Says malformed messages to gateways of each form, and compares what they answer and what they keep.

make fuzz-gateway ARGS="--messages 500000"
python gateway/tests/picker/gateway_fuzzer.py --messages 5000 --seed 7

Two lean gateways, one in Python and one compiled, hear the same bytes at the same time of the same clock, without sockets. A
gateway on grpc.aio hears a fiftieth as many over sockets: there is nothing that its bytes could be compared with.
"""

import argparse
import asyncio
import logging
import random
import secrets
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hpack import Encoder
from malformed import CALL, PROCESS, Said, connection
from test_requests_at_once import BUNDLE, MODELS, Clock, Still
from wires import Sink, by_stream, framed

from penstock.api import headers
from penstock.api.fleet import Fleet, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway import process
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from penstock.gateway.front_ends import FRONT_ENDS, MAX_MESSAGE_BYTES
from penstock.gateway.h2 import frames, server
from penstock.gateway.h2.messages import Assembler, prefixed
from penstock.gateway.h2.server import Server, ServerProtocol
from penstock.gateway.picker.bookings import EXPIRY_S
from penstock.gateway.picker.compiled import Compiled, installed
from penstock.gateway.process import Gateway, GatewaySettings
from penstock.gateway.xds.listener import ListenerSettings

GROWTH_BYTES = 64 * 2**20
"""How much the process may grow after the first tenth: what is remembered of texts has bounds, and they are below it."""
SWEPT_EVERY = 25
"""Connections between two sweeps, each of which is an hour later."""
SOCKET_SHARE = 50


class Faults(logging.Handler):
    """What must not be logged: errors, of asyncio's too, and warnings by their beginnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings, self.errors = Counter[str](), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """A line of the log."""
        if record.levelno >= logging.ERROR:
            self.errors.append(logging.Formatter().format(record))
        else:
            self.warnings[str(record.msg)] += 1

    def check(self) -> None:
        """Raises where something was logged that must not be."""
        assert not self.errors, self.errors[0]


class Side:
    """A gateway of one form. `named`: what the names of its bookings begin with. `fleet`: by default six replicas a model."""

    def __init__(
        self, compiled: Compiled | None, front_end: str = "lean", *, named: str = PROCESS, fleet: Fleet | None = None
    ) -> None:
        listener = ListenerSettings(host="127.0.0.1", port=1)
        settings = GatewaySettings(name="g", host="127.0.0.1", grpc_port=0, http_port=0, listener=listener)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "installed", lambda: compiled)
            patch.setattr(secrets, "token_hex", lambda _: named)
            self.gateway = Gateway(settings, Still())
        self.state, self.service, self.turns = self.gateway._follower.state, self.gateway._extproc, 0
        self.server: Any = FRONT_ENDS[front_end](compiled)
        self.service.add_to(self.server)
        replicas = [
            Replica(uid=f"{model.id}-{n}", name=f"{model.id}-{n}", pool=f"{model.id}/p", host=f"10.0.{at}.{n}", port=8000,
                    events_port=1, replay_port=1, ready=True)
            for at, model in enumerate(MODELS) for n in range(6)
        ]  # fmt: skip
        pools = [Pool(id=f"{it.id}/p", model=it.id) for it in MODELS]
        self.state.update(fleet or Fleet(models=MODELS, pools=pools, replicas=replicas))
        memo = self.gateway._prompts._memo_of(BUNDLE)
        spaces = [(memo, frozenset(self.state.directory.replicas))], frozenset[Any]()
        self.gateway._prompts.spaces = lambda _: spaces  # type: ignore[method-assign] - nobody is there to ask
        self.report()

    def report(self) -> None:
        """Every replica is idle."""
        self.turns += 1
        report = LoadReport(epoch=1, seq=self.turns, max_num_seqs=64, prefill_tokens_per_s=1000.0, decode_step_s=0.01)
        for key in self.state.directory.replicas:
            self.state.reported(key, report, time.monotonic())

    def sweep(self) -> None:
        """What the gateway does every ten seconds, where time has ended all that it books."""
        for _ in range(2):
            self.state.bookings.expire(time.monotonic())
            self.gateway._underway.sweep(time.monotonic())
        self.report()

    def booked(self) -> int:
        """Bookings that nothing has ended."""
        return sum(self.state.bookings.count(key) for key in self.state.directory.replicas)

    def kept(self) -> tuple[int, ...]:
        """Open exchanges, calls, bytes that nobody has read, and what the ceiling counts."""
        lean = (self.server.calls, self.server.unread) if isinstance(self.server, Server) else ()
        return self.service.open, *lean, self.service.ceiling.streams, self.service.ceiling.bytes

    def connect(self) -> None:
        """A new connection."""
        self.protocol, self.sink = ServerProtocol(self.server), Sink()
        self.protocol.connection_made(self.sink)

    def feed(self, read: bytes) -> None:
        """What a transport does with a read: outside of any task."""
        if not self.sink.is_closing():
            asyncio.get_running_loop().call_soon(self.protocol.data_received, read)

    def said(self) -> dict[int, bytes]:
        """What it has written since, by stream."""
        written, self.sink.written = self.sink.written, b""
        return by_stream(written)


def valid() -> Said:
    """A connection with one request that must go on."""
    encoder = Encoder()
    encoder.header_table_size = 0
    message = ProcessingRequest(request_headers=HttpHeaders())
    for name, value in {":method": "POST", ":path": "/v1/chat/completions", headers.REQUEST_ID: "valid"}.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.protocol_config.request_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
    body = ProcessingRequest(
        request_body=HttpBody(body=b'{"model":"m","messages":[{"role":"user","content":"x"}]}', end_of_stream=True)
    )
    data = b"".join(prefixed(it.SerializeToString()) for it in (message, body))
    head = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, encoder.encode([*CALL, (headers.PHASE, headers.REQUEST_PHASE)]))
    return Said([frames.PREFACE + frames.settings({}), head + frames.frame(frames.DATA, 0, 1, data)])


async def told(sides: list[Side], said: Said) -> bytes:
    """One connection to each; returns what the first has written."""
    heard = b""
    for side in sides:
        side.connect()
    for read in said.reads:
        for side in sides:
            side.feed(read)
        for _ in range(6):
            await asyncio.sleep(0)
        answers = [side.said() for side in sides]
        for stream in answers[0].keys() | answers[1].keys():
            one, other = (its.get(stream, b"") for its in answers)
            assert one == other or meant(one) == meant(other), (read, one, other)
        assert sides[0].protocol.connection.closed == sides[1].protocol.connection.closed, read
        heard += b"".join(answers[0].values())
    for side in sides:
        side.protocol.connection_lost(None)
    for _ in range(6):
        await asyncio.sleep(0)
    assert [side.kept() for side in sides] == [(0, 0, 0, 0, 0)] * 2, [side.kept() for side in sides]
    assert sides[0].booked() == sides[1].booked()
    return heard


def meant(written: bytes) -> tuple[list[bytes], list[ProcessingResponse]]:
    """What a stream says, apart from the order in which protobuf writes fields and entries of maps, which is each form's own."""
    others, data = list[bytes](), b""
    for frame in framed(written):
        if frame.kind == frames.DATA:
            data += frame.payload
            others += [bytes((frame.flags,))]
        else:
            others.append(frame.whole)
    return others, [ProcessingResponse.FromString(it) for it in Assembler(MAX_MESSAGE_BYTES).feed(data)]


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Lean:
    """The two lean forms side by side."""

    def __init__(self, seed: int, messages: int, faults: Faults) -> None:
        self.seed, self.wanted, self.faults, self.clock = seed, messages, faults, Clock()
        self.messages = self.connections = self.grown = self.destinations = 0

    def run(self) -> None:
        """All of it, under a clock that only goes on between connections."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", self.clock)
            patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
            patch.setattr(server, "PATIENCE_S", 0.0)  # what nobody waits for goes out in the same turn in both forms
            asyncio.run(self._run())

    async def _run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, it: self.faults.errors.append(repr(it)))
        sides, before = [Side(None), Side(installed())], 0
        while self.messages < self.wanted:
            seed = f"{self.seed}/{self.connections}"
            said = connection(random.Random(seed))
            try:
                heard = await told(sides, said)
                self.faults.check()
                if self.connections % SWEPT_EVERY == 0:
                    await self._swept(sides)
            except BaseException:
                print(f"connection {seed} failed: --seed {self.seed} says it again")
                raise
            self.destinations += heard.count(headers.DESTINATION.encode())
            self.messages, self.connections = self.messages + said.messages, self.connections + 1
            if not before and self.messages * 10 >= self.wanted:
                before = resident()
        await self._swept(sides)
        self.grown = resident() - before
        assert self.grown < GROWTH_BYTES, f"{self.grown:,} bytes more than after the first tenth"
        for side in sides:
            side.gateway._prompts.close()

    async def _swept(self, sides: list[Side]) -> None:
        """An hour later: nothing is booked, and a valid request gets its destination."""
        self.clock.now += EXPIRY_S + 1
        for side in sides:
            side.sweep()
        assert [(side.booked(), len(side.gateway._underway)) for side in sides] == [(0, 0)] * 2
        assert headers.DESTINATION.encode() in await told(sides, valid())


class Aio:
    """grpc.aio over sockets, in real time."""

    def __init__(self, seed: int, messages: int, faults: Faults) -> None:
        self.seed, self.wanted, self.faults = seed, messages, faults
        self.messages = self.connections = 0

    def run(self) -> None:
        """All of it."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, it: self.faults.errors.append(repr(it)))
        side = Side(installed(), "grpc")
        port = await side.server.listen("127.0.0.1", 0, None)
        while self.messages < self.wanted:
            said = connection(random.Random(f"{self.seed}/{self.connections}"))
            await spoken(port, said.reads, 0.02)
            self.faults.check()
            self.messages, self.connections = self.messages + said.messages, self.connections + 1
        async with asyncio.timeout(60):
            while any(side.kept()):
                await asyncio.sleep(0.01)
        side.state.bookings.expire(time.monotonic() + EXPIRY_S + 1)
        assert side.booked() == 0
        side.report()
        assert headers.DESTINATION.encode() in await spoken(port, valid().reads, 5.0, headers.DESTINATION.encode())
        await side.server.stop(0.1)
        side.gateway._prompts.close()


async def spoken(port: int, reads: list[bytes], wait_s: float, wanted: bytes = b"nothing that is said") -> bytes:
    """What a server answers to these bytes until it says what is wanted, ends the connection, or the time is over."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = b""
    try:
        async with asyncio.timeout(wait_s):
            writer.write(b"".join(reads))
            while wanted not in heard and (data := await reader.read(65_536)):
                heard += data
    except (TimeoutError, ConnectionError):
        pass
    writer.transport.abort()
    return heard


def fuzz(messages: int, seed: int) -> str:
    """Says so many messages; returns what came of it, or raises."""
    if installed() is None:
        raise SystemExit("penstock-gateway-native is not built, and there is nothing to compare: make native")
    began, faults = time.monotonic(), Faults()
    logging.getLogger().addHandler(faults)
    try:
        lean, aio = Lean(seed, messages, faults), Aio(seed, messages // SOCKET_SHARE, faults)
        lean.run()
        aio.run()
        faults.check()
    finally:
        logging.getLogger().removeHandler(faults)
    warned = "; ".join(f"{count:,} × {what!r}" for what, count in faults.warnings.items()) or "none"
    return (
        f"{lean.messages:,} messages on {lean.connections:,} connections to both lean forms: the same answers, "
        f"{lean.destinations:,} destinations, {lean.grown / 2**20:.1f} MiB more memory; {aio.messages:,} on {aio.connections:,} "
        f"to grpc.aio; nothing left open or booked; warnings: {warned}; {(time.monotonic() - began) / 60:.1f} minutes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(fuzz(arguments.messages, arguments.seed))


if __name__ == "__main__":
    main()
