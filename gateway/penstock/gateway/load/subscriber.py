"""Follows the event stream of one replica: what it caches, how loaded it is, which requests have ended.

Load reports and ends of requests are passed on at once. Block events count only in order: a gap, a restart and the beginning
are filled by replay, during which later block events wait. What a replay cannot fill is never guessed: the replica's residency
is emptied and said to be partial, and what it stores from then on counts.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import zmq
import zmq.asyncio

from penstock.api import events
from penstock.api.events import BlockRemoved, BlockStored, Event
from penstock.api.fleet import Replica
from penstock.gateway.load.event_wire import Batch, EventWire, PenstockWire
from penstock.gateway.picker.candidates import ReplicaKey, key_of

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 2.0
"""Longest silence within a replay."""
MAX_BACKOFF_S = 5.0
ATTEMPTS = 3
"""Replays that stay silent before the stream goes on without."""
LATER_LIMIT = 10_000
"""Batches that wait for a replay at most."""
RESYNC_S = 30.0
"""Seconds after which a replica that did not answer a replay is asked again."""
RECEIVE_LIMIT = 100_000
"""Messages that wait in the socket during a replay (ZMQ's default is 1,000)."""
BLOCKS_AT_ONCE = 1_000
"""Blocks of a replay between two turns of the event loop: about half a millisecond."""


class EventSink(Protocol):
    """Receives the events of all replicas."""

    def event(self, key: ReplicaKey, event: Event) -> None:
        """One event, block events in order."""
        ...

    def restarted(self, key: ReplicaKey) -> None:
        """A new process: everything that the old one said is void."""
        ...

    def gap(self, key: ReplicaKey) -> None:
        """Messages were lost; a replay follows."""
        ...

    def lost(self, key: ReplicaKey) -> None:
        """Messages were lost that no replay brings back: what was known of its blocks is void."""
        ...

    def complete(self, key: ReplicaKey) -> None:
        """A replay is complete: every block that the replica caches is known."""
        ...


class EventSubscriber:
    """The event stream of one replica, until `run` is cancelled."""

    def __init__(self, context: zmq.asyncio.Context, replica: Replica, sink: EventSink, wire: EventWire | None = None) -> None:
        self._context = context
        self._key = key_of(replica)
        self._name = replica.title
        host = f"[{replica.host}]" if ":" in replica.host else replica.host
        self._stream = f"tcp://{host}:{replica.events_port}"
        self._replay = f"tcp://{host}:{replica.replay_port}" if replica.replay_port else None
        self._sink = sink
        self._wire = wire or PenstockWire()
        self._epoch = 0
        self._streamed = 0
        """Epoch of the last batch of the stream."""
        self._next = 0
        """Sequence number of the next batch whose block events count."""
        self._newest = -1
        """Newest sequence number of the stream."""
        self._anywhere = False
        """Whatever batch comes next, the stream goes on from there."""
        self._whole = True
        """True while no batch is missing since the state was last complete."""
        self._later: list[tuple[int, Batch]] = []
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
            socket.setsockopt(zmq.SUBSCRIBE, self._wire.topic)
            socket.connect(self._stream)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    self._receive(events.decode_seq(frames[1]), frames[2])

    async def _catch_up(self) -> None:
        """Request missing batches until none is missing. If the replica does not answer, continue with the stream and ask again
        later."""
        silent, backoff = 0, 0.1
        while True:
            await self._behind.wait()
            if self._replay is None:
                self._go_on_without()
                continue
            asked_from = self._next
            try:
                async with asyncio.timeout(None) as deadline:
                    await self._request_replay(self._replay, deadline)
            except TimeoutError:
                silent += 1
                if silent < ATTEMPTS and len(self._later) < LATER_LIMIT:
                    log.info("no replay from %s at %s; next try in %.1f s", self._name, self._replay, backoff)
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, MAX_BACKOFF_S)
                else:
                    log.warning("%s does not replay its events (%s): its cache is known in part", self._name, self._replay)
                    self._go_on_without()
                    await asyncio.sleep(RESYNC_S)
                    self._behind.set()
                continue
            silent, backoff = 0, 0.1
            self._settle(asked_from)

    async def _request_replay(self, address: str, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        start = self._next
        if not self._whole and self._wire.snapshot_from is not None:
            start = self._wire.snapshot_from
        with self._socket(zmq.DEALER) as socket:
            socket.connect(address)
            await socket.send_multipart(self._wire.replay_request(start))
            while True:
                deadline.reschedule(loop.time() + REPLAY_TIMEOUT_S)
                frames = await socket.recv_multipart()
                deadline.reschedule(None)  # silence counts, not the time that a large batch takes
                try:
                    message = self._wire.replayed(frames)
                except ValueError as error:
                    log.warning("unreadable replay of %s: %s", self._name, error)
                    continue
                if message is None:
                    return
                if (batch := self._decode(message.payload)) is not None:
                    await self._replayed(message.seq, batch)

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            return self._wire.decode(payload)
        except ValueError as error:
            log.warning("unreadable event of %s: %s", self._name, error)
            return None

    def _receive(self, seq: int, payload: bytes) -> None:
        """A message of the stream."""
        batch = self._decode(payload)
        if batch is None or not self._of_this_process(batch, seq):
            return
        self._newest = seq
        for event in batch.at_once:
            self._sink.event(self._key, event)
        if self._anywhere:
            self._anywhere, self._next = False, seq
        if self._behind.is_set():
            if len(self._later) >= LATER_LIMIT:  # what is dropped here is a gap when the replay ends
                self._later.clear()
            self._later.append((seq, batch))
        elif seq == self._next:
            self._apply(seq, batch)
        elif seq > self._next:
            self._sink.gap(self._key)
            self._later.append((seq, batch))
            self._behind.set()

    async def _replayed(self, seq: int, batch: Batch) -> None:
        # A snapshot may be as old as the newest batch that is known.
        if not self._of_this_process(batch) or seq < self._next - batch.snapshot:
            return
        if batch.snapshot:
            self._whole = True
        elif seq > self._next:  # the publisher does not remember so far back
            self._lose()
        self._next, process = seq + 1, self._epoch
        for event in batch.at_once:
            self._sink.event(self._key, event)
        for own in _portions(event for blocks in batch.blocks for event in self._wire.translate(blocks)):
            self._sink.event(self._key, own)
            if isinstance(own, BlockStored | BlockRemoved) and len(own.block_hashes) == BLOCKS_AT_ONCE:
                await asyncio.sleep(0)
                if self._epoch != process:
                    return

    def _settle(self, asked_from: int) -> None:
        """A replay is complete: what waited for it follows, up to the next gap if there is one."""
        waiting, self._later = self._later, []
        self._behind.clear()
        if waiting and waiting[0][0] > self._next == asked_from:  # it held nothing, and would again
            self._lose()
            self._next = waiting[0][0]
        for at, (seq, batch) in enumerate(waiting):
            if seq > self._next:
                self._later = waiting[at:]
                self._behind.set()
                return
            if seq == self._next:
                self._apply(seq, batch)
        if self._whole:
            self._sink.complete(self._key)

    def _go_on_without(self) -> None:
        """Continue with the stream's next batch, since the replica replays nothing."""
        waiting, self._later = self._later, []
        self._behind.clear()
        self._lose()
        self._anywhere = not waiting
        for at, (seq, batch) in enumerate(waiting):
            if at and seq != self._next:
                self._lose()
            self._apply(seq, batch)

    def _lose(self) -> None:
        self._whole = False
        self._wire.forget()
        self._sink.lost(self._key)

    def _apply(self, seq: int, batch: Batch) -> None:
        for blocks in batch.blocks:
            for event in self._wire.translate(blocks):
                self._sink.event(self._key, event)
        self._next = seq + 1

    def _of_this_process(self, batch: Batch, seq: int | None = None) -> bool:
        """False for the last words of an older process; a newer one starts from nothing.

        Args:
            batch: Of the stream, or of a replay.
            seq: Its number on the stream; None: of a replay.
        """
        if self._restarted(batch, seq):
            self._sink.restarted(self._key)
            self._wire.forget()
            self._next, self._newest, self._whole, self._anywhere = 0, -1, True, False
            self._later.clear()
            self._behind.set()
        return not self._wire.has_epochs or batch.epoch == self._epoch

    def _restarted(self, batch: Batch, seq: int | None) -> bool:
        """The stream is in order, whatever epochs say, which are clocks and may be set back: another one than before is a new
        process's. A replay may be of a process that has gone meanwhile; only a later epoch is news there."""
        if not self._wire.has_epochs:
            fell_back = seq is not None and seq < self._newest
            self._epoch += fell_back
            return fell_back
        before, news = self._epoch, batch.epoch > self._epoch
        if seq is not None:
            news = batch.epoch not in (self._streamed, self._epoch)
            self._streamed = batch.epoch
        if news:
            self._epoch = batch.epoch
        return news and before > 0


def _portions(batch: Iterable[Event]) -> Iterator[Event]:
    """The same events, large ones in several parts."""
    for event in batch:
        if isinstance(event, BlockStored | BlockRemoved):
            hashes = event.block_hashes
            for start in range(0, max(len(hashes), 1), BLOCKS_AT_ONCE):
                yield type(event)(hashes[start : start + BLOCKS_AT_ONCE], event.medium)
        else:
            yield event
