"""The event subscriber against a real ZMQ publisher that loses messages, forgets and restarts."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio

from penstock.api import events
from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, RequestFinished
from penstock.api.fleet import Fleet, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.load import subscriber
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.state import FleetState
from penstock.gateway.residency.index import Knowledge

KEY = ReplicaKey("uid", 8000)


def block(n: int) -> bytes:
    return n.to_bytes(32, "big")


class Engine:
    """The publishing side of `penstock.api.events`, with a short memory."""

    def __init__(self, context: zmq.asyncio.Context, memory: int = 1000) -> None:
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.events_port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._memory = memory
        self.replays = 0
        self.silent = False
        self.restart(epoch=1)
        self._task = asyncio.create_task(self._serve())

    def restart(self, epoch: int) -> None:
        self.epoch, self.seq, self.cached = epoch, 0, set[bytes]()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self._memory)

    async def say(self, *said: Event, lost: bool = False) -> None:
        for event in said:
            match event:
                case BlockStored():
                    self.cached |= set(event.block_hashes)
                case BlockRemoved():
                    self.cached -= set(event.block_hashes)
                case AllBlocksCleared():
                    self.cached.clear()
        payload = events.encode(EventBatch(self.epoch, 0.0, list(said)))
        self._buffer.append((self.seq, payload))
        if not lost:
            await self._pub.send_multipart([events.TOPIC, events.encode_seq(self.seq), payload])
        self.seq += 1

    async def _serve(self) -> None:
        while True:
            peer, frame = await self._router.recv_multipart()
            self.replays += 1
            if self.silent:
                continue
            start = events.decode_seq(frame)
            oldest = self._buffer[0][0] if self._buffer else self.seq
            if start < oldest or start > self.seq:
                snapshot = EventBatch(self.epoch, 0.0, [AllBlocksCleared(), BlockStored(sorted(self.cached))])
                await self._router.send_multipart([peer, events.encode_seq(self.seq - 1), events.encode(snapshot)])
                start = self.seq
            for seq, payload in list(self._buffer):
                if seq >= start:
                    await self._router.send_multipart([peer, events.encode_seq(seq), payload])
            await self._router.send_multipart([peer, events.END_OF_REPLAY, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for socket in (self._pub, self._router):
            socket.close(linger=0)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def follower() -> AsyncIterator[FleetFollower]:
    follower = FleetFollower(FleetState())
    yield follower
    await follower.close()


def follow(follower: FleetFollower, engine: Engine) -> FleetState:
    replica = Replica(
        uid=KEY.uid,
        name="m-0",
        pool="p",
        host="127.0.0.1",
        port=KEY.port,
        events_port=engine.events_port,
        replay_port=engine.replay_port,
        ready=True,
    )
    follower.update(Fleet(replicas=[replica]))
    return follower.state


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def cached(state: FleetState, engine: Engine) -> bool:
    """Whether the index holds exactly what the engine caches."""
    index = state.residency
    return index.blocks(KEY) == len(engine.cached) and all(index.longest_prefix([b]) for b in engine.cached)


async def joined(state: FleetState, engine: Engine) -> None:
    """Speaks until the subscription, which ZMQ makes in its own time, delivers."""
    async with asyncio.timeout(60):
        while state.reports.get(KEY) is None:
            await engine.say(LoadReport(epoch=engine.epoch, seq=0))
            await asyncio.sleep(0.02)


@pytest.mark.req("RT-11", "RT-19")
async def test_what_was_cached_before_the_picker_came_is_replayed(context: zmq.asyncio.Context, follower: FleetFollower) -> None:
    engine = Engine(context)
    for n in range(50):
        await engine.say(BlockStored([block(n)]))
    await engine.say(BlockRemoved([block(7)]))
    state = follow(follower, engine)
    await until(lambda: cached(state, engine))
    assert state.residency.blocks(KEY) == 49
    await engine.close()


@pytest.mark.req("RT-23", "XC-06")
async def test_lost_messages_are_replayed_in_order(context: zmq.asyncio.Context, follower: FleetFollower) -> None:
    engine = Engine(context)
    state = follow(follower, engine)
    await joined(state, engine)
    await engine.say(BlockStored([block(1), block(2)]))
    await until(lambda: cached(state, engine))
    await engine.say(BlockStored([block(3)]), lost=True)
    await engine.say(BlockRemoved([block(1)]), lost=True)
    assert follower.gaps == 0
    await engine.say(BlockStored([block(1)]))  # would be undone if the lost removal came after it
    await until(lambda: cached(state, engine))
    assert state.residency.blocks(KEY) == 3
    assert follower.gaps == 1
    await engine.close()


@pytest.mark.req("RT-23", "XC-06")
async def test_a_gap_beyond_the_publishers_memory_is_filled_by_a_snapshot(
    context: zmq.asyncio.Context, follower: FleetFollower
) -> None:
    engine = Engine(context, memory=3)
    state = follow(follower, engine)
    await joined(state, engine)
    await engine.say(BlockStored([block(n) for n in range(5)]))
    await until(lambda: cached(state, engine))
    for n in range(5):
        await engine.say(BlockRemoved([block(n)]), lost=True)
    await engine.say(BlockStored([block(99)]))
    await until(lambda: cached(state, engine))
    assert state.residency.longest_prefix([block(99)]) == {KEY: 1}
    await engine.close()


@pytest.mark.req("RT-23", "XC-06")
@pytest.mark.parametrize("epoch", [1_001, 3], ids=["later", "clock set back"])
async def test_a_restarted_engine_starts_from_nothing(context: zmq.asyncio.Context, follower: FleetFollower, epoch: int) -> None:
    engine = Engine(context)
    engine.restart(epoch=1_000)
    state = follow(follower, engine)
    await joined(state, engine)
    await engine.say(BlockStored([block(n) for n in range(9)]))
    await until(lambda: cached(state, engine))
    booking = state.bookings.book("r", KEY, 10, 0.0)
    engine.restart(epoch)
    await engine.say(BlockStored([block(50)]), lost=True)
    await engine.say(BlockStored([block(51)]), LoadReport(epoch=epoch, seq=1, num_requests_running=7))
    await until(lambda: cached(state, engine))
    heard = state.reports.get(KEY)
    assert heard is not None and heard.report.num_requests_running == 7
    assert state.bookings.released == {"new_epoch": 1}
    assert booking.state.value == "released"
    await engine.close()


async def test_loads_and_ends_are_heard_although_replay_is_dead(context: zmq.asyncio.Context, follower: FleetFollower) -> None:
    engine = Engine(context)
    engine._task.cancel()
    state = follow(follower, engine)
    await joined(state, engine)
    state.bookings.book("r", KEY, 10, 0.0)
    await engine.say(RequestFinished("r", "stop", 1, 0, 1), LoadReport(epoch=1, seq=5, num_requests_running=3))
    await until(lambda: state.bookings.count(KEY) == 0)
    heard = state.reports.get(KEY)
    assert heard is not None
    assert heard.report.num_requests_running == 3
    await engine.close()


async def test_noise_on_the_stream_is_ignored(context: zmq.asyncio.Context, follower: FleetFollower) -> None:
    engine = Engine(context)
    state = follow(follower, engine)
    await joined(state, engine)
    await engine._pub.send_multipart([events.TOPIC, b"\0" * 8, b"garbage"])
    await engine._pub.send_multipart([events.TOPIC + b"x"])
    await engine.say(BlockStored([block(1)]))
    await until(lambda: cached(state, engine))
    await engine.close()


async def test_a_replica_that_goes_is_forgotten(context: zmq.asyncio.Context, follower: FleetFollower) -> None:
    engine = Engine(context)
    state = follow(follower, engine)
    await joined(state, engine)
    await engine.say(BlockStored([block(1)]))
    await until(lambda: cached(state, engine))
    follower.update(Fleet())
    assert len(state.residency) == 0
    assert state.reports.get(KEY) is None
    await engine.say(BlockStored([block(2)]))
    await asyncio.sleep(0.05)
    assert len(state.residency) == 0
    await engine.close()


@pytest.mark.req("RT-23", "XC-06")
async def test_what_no_replay_brings_back_is_unknown_until_one_does(
    context: zmq.asyncio.Context, follower: FleetFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(subscriber, "RESYNC_S", 0.2)
    engine = Engine(context)
    state = follow(follower, engine)
    await joined(state, engine)
    await engine.say(BlockStored([block(n) for n in range(5)]))
    await until(lambda: cached(state, engine))
    assert state.residency.knowledge(KEY) is Knowledge.EXACT
    engine.silent = True
    await engine.say(BlockRemoved([block(0)]), lost=True)
    await engine.say(BlockStored([block(7)]))
    await until(lambda: state.residency.knowledge(KEY) is Knowledge.PARTIAL)
    await engine.say(BlockStored([block(8)]))
    await until(lambda: state.residency.longest_prefix([block(8)]) == {KEY: 1})
    known = [n for n in range(10) if state.residency.longest_prefix([block(n)])]
    assert known == [7, 8]  # not what was cached before, of which nobody knows whether it still is
    engine.silent = False
    await until(lambda: cached(state, engine))
    assert state.residency.knowledge(KEY) is Knowledge.EXACT
    assert state.residency.blocks(KEY) == 6
    await engine.close()


@pytest.mark.req("RT-19", "RT-23")
@pytest.mark.parametrize("seed", range(3))
async def test_any_loss_ends_with_what_the_engine_caches(
    context: zmq.asyncio.Context, follower: FleetFollower, seed: int
) -> None:
    chance = random.Random(seed)
    engine = Engine(context, memory=chance.choice([1, 5, 1000]))
    state = follow(follower, engine)
    await joined(state, engine)
    for step in range(200):
        some = [block(chance.randrange(40)) for _ in range(chance.randrange(1, 5))]
        event = chance.choice([BlockStored(some), BlockStored(some), BlockRemoved(some), AllBlocksCleared()])
        await engine.say(event, lost=chance.random() < 0.3)
        if chance.random() < 0.01:
            engine.restart(engine.epoch + 1)
        if step % 20 == 0:
            await asyncio.sleep(0.01)
    await engine.say(BlockStored([block(99)]))
    await until(lambda: cached(state, engine))
    await until(lambda: state.residency.knowledge(KEY) is Knowledge.EXACT)
    await engine.close()


@pytest.mark.req("RT-23")
async def test_a_large_snapshot_is_taken_in_by_portions(context: zmq.asyncio.Context, follower: FleetFollower) -> None:
    engine = Engine(context, memory=1)
    await engine.say(BlockStored([block(n) for n in range(5_000)]))
    await engine.say(BlockStored([block(5_000)]))
    state = follow(follower, engine)
    seen: list[int] = []
    async with asyncio.timeout(60):
        while not cached(state, engine):
            seen.append(state.residency.blocks(KEY))
            await asyncio.sleep(0)
    assert {1_000, 2_000, 3_000, 4_000} <= set(seen)  # others had their turn in between
    await engine.close()
