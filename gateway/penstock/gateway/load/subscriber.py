"""Follows the event stream of one replica: what it caches, how loaded it is, which requests have ended.

Load reports and ends of requests are passed on at once. Block events count only in order: a gap, a restart and the beginning
are filled by replay, during which later block events wait.
"""

import asyncio
import logging
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from penstock.api import events
from penstock.api.events import Event, EventBatch, RequestFinished
from penstock.api.fleet import Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import ReplicaKey, key_of

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 2.0
"""Longest silence within a replay."""
MAX_BACKOFF_S = 5.0
RECEIVE_LIMIT = 100_000
"""Messages that wait in the socket during a replay (ZMQ's default is 1,000)."""


class EventSink(Protocol):
    """Where the events of all replicas go."""

    def event(self, key: ReplicaKey, event: Event) -> None:
        """One event, block events in order."""
        ...

    def restarted(self, key: ReplicaKey) -> None:
        """A new process: everything that the old one said is void."""
        ...

    def gap(self, key: ReplicaKey) -> None:
        """Messages were lost; a replay follows."""
        ...


class EventSubscriber:
    """The event stream of one replica, until `run` is cancelled."""

    def __init__(self, context: zmq.asyncio.Context, replica: Replica, sink: EventSink) -> None:
        self._context = context
        self._key = key_of(replica)
        self._name = replica.name
        host = f"[{replica.host}]" if ":" in replica.host else replica.host
        self._stream = f"tcp://{host}:{replica.events_port}"
        self._replay = f"tcp://{host}:{replica.replay_port}"
        self._sink = sink
        self._epoch = 0
        self._next = 0
        """Sequence number of the next batch whose block events count."""
        self._later: list[tuple[int, EventBatch]] = []
        """Batches that wait for a replay."""
        self._behind = asyncio.Event()
        self._behind.set()

    async def run(self) -> None:
        """Listens and replays."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._catch_up())

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_LIMIT)
        return socket

    async def _listen(self) -> None:
        with self._socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, events.TOPIC)
            socket.connect(self._stream)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and (batch := self._decode(frames[2])) is not None:
                    self._receive(events.decode_seq(frames[1]), batch)

    async def _catch_up(self) -> None:
        backoff = 0.1
        while True:
            await self._behind.wait()
            try:
                async with asyncio.timeout(None) as deadline:
                    await self._request_replay(deadline)
            except TimeoutError:
                log.info("no replay from %s at %s; next try in %.1f s", self._name, self._replay, backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)
                continue
            backoff = 0.1
            self._settle()

    async def _request_replay(self, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        with self._socket(zmq.DEALER) as socket:
            socket.connect(self._replay)
            await socket.send_multipart([events.encode_seq(self._next)])
            while True:
                deadline.reschedule(loop.time() + REPLAY_TIMEOUT_S)
                frames = await socket.recv_multipart()
                if frames[0] == events.END_OF_REPLAY:
                    return
                if len(frames) == 2 and (batch := self._decode(frames[1])) is not None:
                    self._replayed(events.decode_seq(frames[0]), batch)

    def _decode(self, payload: bytes) -> EventBatch | None:
        try:
            return events.decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("unreadable event of %s: %s", self._name, error)
            return None

    def _receive(self, seq: int, batch: EventBatch) -> None:
        if not self._of_this_epoch(batch):
            return
        for event in batch.events:
            if isinstance(event, LoadReport | RequestFinished):
                self._sink.event(self._key, event)
        if self._behind.is_set():
            self._later.append((seq, batch))
        elif seq == self._next:
            self._apply_blocks(seq, batch)
        elif seq > self._next:
            self._sink.gap(self._key)
            self._later.append((seq, batch))
            self._behind.set()

    def _replayed(self, seq: int, batch: EventBatch) -> None:
        if not self._of_this_epoch(batch) or seq < self._next:
            return
        for event in batch.events:
            self._sink.event(self._key, event)
        self._next = seq + 1

    def _settle(self) -> None:
        """A replay is complete: what waited for it follows, up to the next gap if there is one."""
        waiting, self._later = self._later, []
        self._behind.clear()
        for at, (seq, batch) in enumerate(waiting):
            if seq > self._next:
                self._later = waiting[at:]
                self._behind.set()
                return
            if seq == self._next:
                self._apply_blocks(seq, batch)

    def _apply_blocks(self, seq: int, batch: EventBatch) -> None:
        for event in batch.events:
            if not isinstance(event, LoadReport | RequestFinished):
                self._sink.event(self._key, event)
        self._next = seq + 1

    def _of_this_epoch(self, batch: EventBatch) -> bool:
        """False for the last words of an older process; a newer one begins afresh."""
        if batch.epoch > self._epoch:
            if self._epoch:
                self._sink.restarted(self._key)
            self._epoch, self._next = batch.epoch, 0
            self._later.clear()
            self._behind.set()
        return batch.epoch == self._epoch
