"""The event streams of simulated engines: load reports as often as engines send them, and the end of each request."""

import time
from collections import Counter
from types import TracebackType

import msgspec
import zmq

from benchmarks.gatewaybench.backend import REPORT_EVERY_S
from penstock.api import events as wire
from penstock.api.events import Event, EventBatch, RequestFinished
from penstock.api.load_report import LoadReport


class Engines:
    """Those at `addresses` (host, port): their streams are at the next port, and the replays at the one after. `tick` does all
    that is due.

    Args:
        addresses: Where they are.
        report: What each says of itself.
    """

    def __init__(self, addresses: list[tuple[str, int]], report: LoadReport) -> None:
        self._context, self._report = zmq.Context(), report
        self._streams: dict[str, zmq.Socket[bytes]] = {}
        self._replays: list[zmq.Socket[bytes]] = []
        self._ended: dict[str, list[Event]] = {}
        self._seqs: Counter[str] = Counter()
        self._stepped_at = self._reported_at = 0.0
        for host, port in addresses:
            stream, replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
            stream.bind(f"tcp://{host}:{port + 1}")
            replay.bind(f"tcp://{host}:{port + 2}")
            self._streams[f"{host}:{port}"] = stream
            self._replays.append(replay)

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.destroy(linger=0)

    def finished(self, served: str, request_id: str) -> None:
        """A request has ended at the engine `served`."""
        self._ended.setdefault(served, []).append(RequestFinished(request_id, "stop", 600, 0, 16))

    def tick(self, now: float) -> None:
        """Says what has happened, once a step as engines do, and that nothing was missed."""
        if now - self._stepped_at < self._report.decode_step_s:
            return
        self._stepped_at = now
        ended, self._ended = self._ended, {}
        if now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            for served in self._streams:
                ended.setdefault(served, []).append(msgspec.structs.replace(self._report, seq=self._seqs[served] + 2))
        for served, what in ended.items():
            batch = EventBatch(epoch=self._report.epoch, time=time.time(), events=what)
            self._streams[served].send_multipart([wire.TOPIC, wire.encode_seq(self._seqs[served]), wire.encode(batch)])
            self._seqs[served] += 1
        for replay in self._replays:
            while replay.poll(0):
                caller, *_ = replay.recv_multipart()
                replay.send_multipart([caller, wire.END_OF_REPLAY, b""])
