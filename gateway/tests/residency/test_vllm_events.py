"""vLLM's events, golden frames of both forms, and a publisher that answers replays as vLLM's does."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from penstock.api import events
from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from penstock.api.fleet import Fleet, Replica
from penstock.gateway.load import subscriber
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.load.traits import FOREIGN_SEED
from penstock.gateway.load.vllm_events import VllmWire
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.state import FleetState
from penstock.gateway.residency.index import Knowledge, ResidencyIndex
from penstock.prompt.hashing import BlockHasher, ExtraKeys

KEY = ReplicaKey("uid", 8000)
HASHER = BlockHasher(4, FOREIGN_SEED)
TOKENS = list(range(16))
OWN = HASHER.hash(TOKENS)

# As vLLM 0.10 sends it: [ts, [["BlockStored", [1, 2], None, [0…7], 4, None]], 0], hashes being integers.
ARRAYS = bytes.fromhex(
    "93cb41d954fc4000000091" "96ab426c6f636b53746f726564" "920102" "c0" "980001020304050607" "04" "c0" "00"
)  # fmt: skip
# As later versions do: {"ts": …, "events": [{"type": "BlockStored", …}], "data_parallel_rank": 0}, hashes being bytes.
MAPS = bytes.fromhex(
    "83a27473cb41d954fc40000000a66576656e747391"
    "88a474797065ab426c6f636b53746f726564"
    "ac626c6f636b5f68617368657392c4020a01c4020a02"
    "b1706172656e745f626c6f636b5f68617368c0"
    "a9746f6b656e5f696473980001020304050607"
    "aa626c6f636b5f73697a6504"
    "a76c6f72615f6964c0" "a66d656469756da3475055" "a96c6f72615f6e616d65c0"
    "b2646174615f706172616c6c656c5f72616e6b00"
)  # fmt: skip


def told(wire: VllmWire, payload: bytes) -> list[Event]:
    return [event for native in wire.decode(payload).blocks for event in wire.translate(native)]


def packed(*found: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, list(found), 0])


def stored(names: list[Any], parent: Any, tokens: list[int], **more: Any) -> dict[str, Any]:
    known = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens, "block_size": 4}
    return {**known, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


@pytest.mark.req("RT-08", "RT-11", "RT-21")
@pytest.mark.parametrize("payload", [ARRAYS, MAPS], ids=["arrays", "maps"])
def test_golden_frames_of_both_forms_become_our_hashes(payload: bytes) -> None:
    assert told(VllmWire(FOREIGN_SEED), payload) == [BlockStored(OWN[:2])]


@pytest.mark.req("RT-08", "RT-09", "RT-10")
def test_a_chain_goes_on_from_its_parent_and_is_removed_by_the_engines_names() -> None:
    wire = VllmWire(FOREIGN_SEED)
    told(wire, packed(stored([11, 12], None, TOKENS[:8])))
    assert told(wire, packed(stored([13, 14], 12, TOKENS[8:]))) == [BlockStored(OWN[2:])]
    assert told(wire, packed(["BlockRemoved", [14, 99]])) == [BlockRemoved([OWN[3]])]
    assert told(wire, packed({"type": "AllBlocksCleared"})) == [AllBlocksCleared()]
    assert told(wire, packed(["BlockRemoved", [11]])) == []


@pytest.mark.req("RT-24")
def test_orphans_and_what_is_not_text_alone_are_left_out() -> None:
    wire = VllmWire(FOREIGN_SEED)
    assert told(wire, packed(stored([5], 4, TOKENS[:4]))) == []
    assert told(wire, packed(stored([6], None, TOKENS[:4], extra_keys=[["image-hash", 3]]))) == []
    assert told(wire, packed(stored([7], 6, TOKENS[4:8]))) == []
    assert told(wire, packed(stored([8], None, TOKENS[:4], medium="CPU"))) == []
    assert told(wire, packed(stored([9], None, TOKENS[:4], lora_id=3))) == []
    assert told(wire, packed(stored([9], None, TOKENS[:3]))) == []


@pytest.mark.req("RT-39")
def test_adapters_and_salts_fork_the_hashes_as_in_prompts() -> None:
    wire = VllmWire(FOREIGN_SEED)
    salted = stored([1], None, TOKENS[:4], extra_keys=[["salt"]])
    adapted = stored([2], None, TOKENS[:4], lora_name="sql", extra_keys=[["sql", "salt"]])
    sglangs = stored([3], None, TOKENS[:4], cache_salt="salt", session_id="s")
    for event in (salted, sglangs):
        assert told(wire, packed(event)) == [BlockStored(HASHER.hash(TOKENS[:4], ExtraKeys(cache_salt="salt")))]
    assert told(wire, packed(adapted)) == [BlockStored(HASHER.hash(TOKENS[:4], ExtraKeys(lora="sql", cache_salt="salt")))]


def test_a_group_of_sliding_windows_says_nothing_of_prefixes() -> None:
    wire = VllmWire(FOREIGN_SEED)
    told(wire, packed(stored([1], None, TOKENS[:4], group_idx=0, kv_cache_spec_kind="full_attention")))
    assert told(wire, packed(stored([1], None, TOKENS[:4], group_idx=1, kv_cache_spec_kind="sliding_window"))) == []
    assert told(wire, packed({"type": "BlockRemoved", "block_hashes": [1], "group_idx": 1})) == []
    assert told(wire, packed({"type": "BlockRemoved", "block_hashes": [1], "group_idx": 0})) == [BlockRemoved([OWN[0]])]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        packed(7),
        packed([]),
        packed(["Other"]),
        packed(["BlockStored", 1]),
        packed({"type": "BlockRemoved"}),
        b"\x80",
    ],
    ids=repr,
)
def test_garbage_is_an_error_of_the_value(payload: bytes) -> None:
    with pytest.raises(ValueError):
        VllmWire(FOREIGN_SEED).decode(payload)


class Vllm:
    """The publisher's side, with its bounded buffer and no snapshots.

    Args:
        context: Of its sockets.
        memory: Batches that it replays.
        topics: Whether replays name the topic before the number, as those of vLLM 0.32 do.
    """

    def __init__(self, context: zmq.asyncio.Context, memory: int, topics: bool = False) -> None:
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.ports = self._pub.bind_to_random_port("tcp://127.0.0.1"), self._router.bind_to_random_port("tcp://127.0.0.1")
        self._memory = memory
        self._topic, self._no_topic = ([b"kv"], [b""]) if topics else ([], [])
        self.restart()
        self._task = asyncio.create_task(self._serve())

    def restart(self) -> None:
        self.seq, self.cached = 0, dict[int, bytes]()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self._memory)

    async def say(self, *found: Any, lost: bool = False) -> None:
        payload = packed(*found)
        self._buffer.append((self.seq, payload))
        if not lost:
            await self._pub.send_multipart([b"kv", events.encode_seq(self.seq), payload])
        self.seq += 1

    async def store(self, first: int, lost: bool = False) -> None:
        """One block of its own, by the name `first`."""
        tokens = list(range(first, first + 4))
        self.cached[first] = HASHER.hash(tokens)[0]
        await self.say(stored([first], None, tokens), lost=lost)

    async def remove(self, name: int, lost: bool = False) -> None:
        self.cached.pop(name, None)
        await self.say(["BlockRemoved", [name]], lost=lost)

    async def _serve(self) -> None:
        while True:
            peer, empty, start = await self._router.recv_multipart()
            for seq, payload in list(self._buffer):
                if seq >= events.decode_seq(start):
                    await self._router.send_multipart([peer, empty, *self._topic, events.encode_seq(seq), payload])
            await self._router.send_multipart([peer, empty, *self._no_topic, events.END_OF_REPLAY, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for socket in (self._pub, self._router):
            socket.close(linger=0)


@pytest.fixture
async def follower(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FleetFollower]:
    monkeypatch.setattr(subscriber, "REPLAY_TIMEOUT_S", 0.5)
    follower = FleetFollower(FleetState())
    yield follower
    await follower.close()


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


def follow(follower: FleetFollower, engine: Vllm, *, replay: bool = True) -> FleetState:
    known: dict[str, Any] = {"uid": KEY.uid, "name": "v-0", "pool": "p", "host": "127.0.0.1", "port": KEY.port, "ready": True}
    port, replay_port = engine.ports
    replica = Replica(**known, events_port=port, replay_port=replay_port if replay else 0, engine="vllm")
    follower.update(Fleet(replicas=[replica]))
    return follower.state


def known(state: FleetState, engine: Vllm) -> bool:
    index = state.residency
    return index.blocks(KEY) == len(engine.cached) and all(index.longest_prefix([own]) for own in engine.cached.values())


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def joined(state: FleetState, engine: Vllm) -> None:
    """Speaks until the subscription delivers."""
    async with asyncio.timeout(60):
        while not state.residency.longest_prefix([HASHER.hash([0, 1, 2, 3])[0]]):
            await engine.store(0)
            await asyncio.sleep(0.02)


@pytest.mark.req("RT-11", "RT-19", "RT-23")
@pytest.mark.parametrize("topics", [False, True])
async def test_the_stream_and_its_replay_are_followed(
    context: zmq.asyncio.Context, follower: FleetFollower, topics: bool
) -> None:
    engine = Vllm(context, memory=10_000, topics=topics)
    for n in range(100, 120):
        await engine.store(n)
    state = follow(follower, engine)
    await until(lambda: known(state, engine))
    assert state.residency.knowledge(KEY) is Knowledge.EXACT
    await joined(state, engine)
    await engine.remove(100, lost=True)
    await engine.store(200)
    await until(lambda: known(state, engine))
    assert state.residency.knowledge(KEY) is Knowledge.EXACT
    engine.restart()
    await engine.store(300)
    await until(lambda: known(state, engine))
    assert state.residency.blocks(KEY) == 1
    await engine.close()


@pytest.mark.req("RT-23")
@pytest.mark.parametrize("replay", [True, False])
async def test_what_the_buffer_does_not_reach_is_unknown(
    context: zmq.asyncio.Context, follower: FleetFollower, replay: bool
) -> None:
    engine = Vllm(context, memory=3)
    state = follow(follower, engine, replay=replay)
    await joined(state, engine)
    await engine.store(100)
    await until(lambda: state.residency.longest_prefix([engine.cached[100]]))
    for n in range(5):
        await engine.remove(100 + n, lost=True)
    await engine.store(200)
    await until(
        lambda: state.residency.knowledge(KEY) is Knowledge.PARTIAL and state.residency.longest_prefix([engine.cached[200]])
    )
    own = HASHER.hash([100, 101, 102, 103])
    assert not state.residency.longest_prefix(own)
    await engine.close()


@pytest.mark.req("RT-19", "RT-24")
@pytest.mark.parametrize("seed", range(3))
async def test_no_loss_leaves_a_block_that_the_engine_has_not(
    context: zmq.asyncio.Context, follower: FleetFollower, seed: int
) -> None:
    chance = random.Random(seed)
    engine = Vllm(context, memory=chance.choice([1, 10, 10_000]))
    state = follow(follower, engine)
    await joined(state, engine)
    for step in range(150):
        act = engine.store if chance.random() < 0.6 else engine.remove
        await act(1000 + chance.randrange(30), lost=chance.random() < 0.2)
        if step % 20 == 0:
            await asyncio.sleep(0.01)
    await engine.store(9999)
    await until(lambda: state.residency.longest_prefix([engine.cached[9999]]))
    every = {n: HASHER.hash(list(range(n, n + 4))) for n in range(1000, 1030)}
    believed = {n for n, own in every.items() if state.residency.longest_prefix(own)}
    assert believed <= engine.cached.keys()
    await engine.close()


@pytest.mark.req("RT-24")
def test_a_prefix_that_is_used_stays_known_past_the_bound() -> None:
    """An engine with many small blocks stores more than is kept; chats that begin alike go on being understood."""
    most = 256
    index = ResidencyIndex(per_replica=most)
    wire = VllmWire(FOREIGN_SEED, lambda own: index.holds(KEY, own), most)
    system = HASHER.hash(TOKENS)
    known = told(wire, packed(stored([1, 2, 3, 4], None, TOKENS)))
    chance, sizes = random.Random(0), []
    for chat in range(3_000):
        assert known, chat
        for event in known:
            assert isinstance(event, BlockStored)
            index.store(KEY, event.block_hashes)
        index.used(KEY, system)
        sizes.append(len(wire._own))
        names = [(chat, n).__hash__() for n in range(chance.randint(1, 5))]
        known = told(wire, packed(stored(names, chance.choice([2, 4]), [chance.randrange(1000) for _ in range(4 * len(names))])))
    assert max(sizes) < 1.6 * most
    assert sizes[-1] >= most


def test_names_are_bounded_whatever_the_index_says() -> None:
    wire = VllmWire(FOREIGN_SEED, lambda own: True, 100)
    for n in range(1_000):
        told(wire, packed(stored([n], None, [n, 0, 0, 0])))
    assert len(wire._own) <= 200
