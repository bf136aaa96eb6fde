"""What a real Envoy once said to the picker (`gateway/tests/wire/recorder.py`), again to a gateway of each form: the same
answers, read by read."""

import asyncio
import base64
import gzip
import re
import time
import uuid
from collections import Counter
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_fuzzer import Side, meant
from test_requests_at_once import Clock

from penstock.api.fleet import Fleet
from penstock.gateway.h2 import server
from penstock.gateway.picker.compiled import MODULE, installed

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")
RECORDED = Path(__file__).parent / "recorded.json.gz"


class Recording(msgspec.Struct):
    """What the recorder writes."""

    fleet: Fleet
    reads: list[tuple[int, str]]
    """Connections, and what each said, in base 85."""


class AtOnce(Executor):
    """Threads would answer whenever the machine lets them."""

    def submit(self, fn: Any, /, *args: Any, **named: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(fn(*args, **named))
        return done


class Replay:
    """A gateway that hears the recorded connections."""

    def __init__(self, recording: Recording, named: str, *, compiled: bool) -> None:
        self.side = Side(installed() if compiled else None, named=named, fleet=recording.fleet)
        self.side.gateway._prompts._pool.shutdown()
        self.side.gateway._prompts._pool = AtOnce()  # type: ignore[assignment] - as much as is used of one
        self._connections = dict[int, tuple[Any, Any]]()

    def hear(self, connection: int, read: bytes) -> None:
        """One read."""
        if connection not in self._connections:
            self.side.connect()
            self._connections[connection] = self.side.protocol, self.side.sink
        self.side.protocol, self.side.sink = self._connections[connection]
        self.side.feed(read)

    def said(self) -> dict[tuple[int, int], bytes]:
        """What it has written since, by connection and stream."""
        said = dict[tuple[int, int], bytes]()
        for number, its in self._connections.items():
            self.side.protocol, self.side.sink = its
            said |= {(number, stream): written for stream, written in self.side.said().items()}
        return said

    def end(self) -> None:
        """Envoy goes."""
        for protocol, _ in self._connections.values():
            protocol.connection_lost(None)


def test_both_forms_answer_envoy_alike() -> None:
    recording = msgspec.json.decode(gzip.decompress(RECORDED.read_bytes()), type=Recording)
    reads = [(number, base64.b85decode(data)) for number, data in recording.reads]
    found = re.search(rb"booking\x12.{1,2}\x1a.([0-9a-f]{8})-[0-9a-f]+", b"".join(data for _, data in reads), re.DOTALL)
    assert found is not None, "no head of a response was recorded"
    clock, heard = Clock(), dict[tuple[int, int], bytes]()

    async def replay() -> tuple[Side, Side]:
        sides = [Replay(recording, found[1].decode(), compiled=compiled) for compiled in (False, True)]
        for number, data in reads:
            clock.now += 0.05  # and what the replicas have taken in is done
            for it in sides:
                it.side.report()
                it.hear(number, data)
            for _ in range(20):
                await asyncio.sleep(0)
            one, other = (it.said() for it in sides)
            for stream in one.keys() | other.keys():
                assert meant(one.get(stream, b"")) == meant(other.get(stream, b"")), (number, data, stream)
                heard[stream] = heard.get(stream, b"") + one[stream]
            assert sides[0].side.kept() == sides[1].side.kept()
        for it in sides:
            it.end()
        await asyncio.sleep(0)
        assert [it.side.kept() for it in sides] == [(0, 0, 0, 0, 0)] * 2
        return sides[0].side, sides[1].side

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
        patch.setattr(server, "PATIENCE_S", 0.0)
        python, compiled = asyncio.run(replay())
    assert python.state.bookings.released == compiled.state.bookings.released
    assert python.booked() == compiled.booked()
    assert python.state.bookings.released["answered"] > 40, "heads of responses were of requests that nobody knows"
    kinds = Counter(it.WhichOneof("response") for said in heard.values() for it in meant(said)[1])
    assert kinds["request_headers"] > 100 and kinds["immediate_response"] > 20
