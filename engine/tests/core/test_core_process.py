"""The core's process and its client, with the fake runner: the protocol, the event stream, and every way to die."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from fake_runner import CRASHING_TOKEN, FAILING_TOKEN, SLOWER_TOKEN, reference
from harness import make_config, make_request

from penstock.api import events
from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, RequestFinished
from penstock.api.load_report import LoadReport
from penstock.engine.commands import ResetPrefixCache
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.calls import CommandRefused
from penstock.engine.core.ipc.client import CoreClient, CoreError
from penstock.engine.kv_events_config import KVEventsConfig
from penstock.engine.messages import QUEUE_FULL, QUEUE_TIMEOUT, ExtendPrompt, FinishReason, StepOutputs
from penstock.engine.stats import CoreStats
from penstock.prompt.hashing import BlockHasher, ExtraKeys

RUNNER = "fake_runner:FakeRunner"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@asynccontextmanager
async def running(config=None, **addresses):
    client = CoreClient(config or make_config(), runner=RUNNER, **addresses)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def test_nothing_lies_in_the_file_system_once_both_ends_have_met(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with running() as client:  # whose process might be killed now
        assert list(tmp_path.iterdir()) == []
        await client.add(make_request(0, [1, 2, 3], 2))
        await asyncio.wait_for(Frontend().until(client, 0), 60)


class Frontend:
    """Consumes outputs until told to stop; what it saw is in its fields."""

    def __init__(self) -> None:
        self.streams = defaultdict(list)
        self.finished = {}
        self.cached = {}
        self.stats: list[CoreStats] = []

    async def until(self, client: CoreClient, *indexes: int) -> None:
        async for output in client.outputs():
            self.take(output)
            if set(indexes) <= set(self.finished):
                return

    def take(self, output) -> None:
        if isinstance(output, CoreStats):
            self.stats.append(output)
            return
        assert isinstance(output, StepOutputs)
        tokens, offsets = np.frombuffer(output.token_ids, "<i4"), np.frombuffer(output.offsets, "<i4")
        for at, index in enumerate(np.frombuffer(output.indexes, "<i8").tolist()):
            self.streams[index] += tokens[offsets[at] : offsets[at + 1]].tolist()
        self.cached |= {started.index: started.cached_tokens for started in output.started}
        self.finished |= {finished.index: finished for finished in output.finished}


async def consume(client: CoreClient, call: asyncio.Task) -> None:
    """Listens to the core until a call has its answer."""
    async for _ in client.outputs():
        if call.done():
            return


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.req("RL-12", "RL-13", "IPC-01", "IPC-02", "IPC-04", "AS-17")
@pytest.mark.parametrize("depth", [1, 2])
async def test_streams_come_back_and_nobody_dies_with_a_failing_request(depth):
    async with running(make_config(depth=depth)) as client:
        assert client.pid != os.getpid()
        frontend = Frontend()
        for index in range(6):
            await client.add(make_request(index, [index, 1, 2], 9))
        await client.add(make_request(6, [FAILING_TOKEN], 5))
        await client.add(make_request(7, [5] * 64, 5))
        await frontend.until(client, *range(8))
        for index in range(6):
            assert frontend.streams[index] == reference([index, 1, 2], 9)
            assert frontend.finished[index].reason is FinishReason.LENGTH
        assert frontend.finished[6].error == "the logits are not finite"
        assert frontend.finished[7].reason is FinishReason.IGNORED and "64 tokens" in frontend.finished[7].error


@pytest.mark.req("RL-06")
async def test_a_prompt_in_parts_gives_what_it_gives_in_one():
    async with running() as client:
        frontend, prompt = Frontend(), list(range(30))
        await client.add(make_request(0, prompt[:7], 9, complete=False))
        await client.add(make_request(1, prompt, 9))
        await frontend.until(client, 1)
        assert not frontend.streams[0]
        await client.extend(ExtendPrompt(0, prompt[7:20], last=False))
        await client.extend(ExtendPrompt(0, prompt[20:], last=True))
        await frontend.until(client, 0)
        assert frontend.streams[0] == frontend.streams[1] == reference(prompt, 9)


async def test_a_deadline_comes_though_nothing_else_happens():
    async with running() as client:
        frontend = Frontend()
        deadline = time.time() + 0.2
        await client.add(make_request(0, [1], 9, complete=False, deadline=deadline))
        await asyncio.wait_for(frontend.until(client, 0), 60)
        assert frontend.finished[0].code == QUEUE_TIMEOUT and time.time() >= deadline


@pytest.mark.req("RL-17", "KV-31")
async def test_abort_ends_a_running_request_and_frees_its_blocks():
    async with running() as client:
        frontend = Frontend()
        await client.add(make_request(1, [SLOWER_TOKEN, 1], 60))
        async for output in client.outputs():
            frontend.take(output)
            if len(frontend.streams[1]) >= 2:
                break
        await client.abort([1, 99])
        await frontend.until(client, 1)
        assert frontend.finished[1].reason is FinishReason.ABORT and len(frontend.streams[1]) < 60
        async for output in client.outputs():
            if isinstance(output, CoreStats) and output.report.num_requests_running == 0:
                assert output.report.kv_cache_usage_perc == 0
                break


@pytest.mark.req("IPC-04", "PC-21")
async def test_a_command_is_answered_and_a_refusal_says_why():
    async with running() as client:
        await client.add(make_request(0, [SLOWER_TOKEN, 1], 60))
        outputs = client.outputs()
        async for output in outputs:
            if isinstance(output, StepOutputs):
                break
        refused = asyncio.create_task(client.call(ResetPrefixCache()))
        await consume(client, refused)
        with pytest.raises(CommandRefused, match="1 requests hold blocks"):
            refused.result()
        await client.abort([0])
        done = asyncio.create_task(client.call(ResetPrefixCache()))
        await consume(client, done)
        assert done.result() is None
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        lost = asyncio.create_task(client.call(ResetPrefixCache()))
        await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(CoreError, match="signal 9"):
            await consume(client, lost)
        with pytest.raises(CoreError, match="signal 9"):
            await lost


async def test_a_full_queue_refuses_by_name():
    async with running(make_config(max_num_seqs=1, max_num_waiting=2)) as client:
        frontend = Frontend()
        await client.add(make_request(0, [SLOWER_TOKEN], 60))
        async for output in client.outputs():
            frontend.take(output)
            if frontend.streams[0]:
                break
        for index in range(1, 8):
            await client.add(make_request(index, [index], 5))
        await frontend.until(client, *range(3, 8))
        await client.abort([0])
        await frontend.until(client, *range(8))
        refused = [index for index, finished in frontend.finished.items() if finished.code == QUEUE_FULL]
        assert len(refused) == 5 and not any(frontend.streams[index] for index in refused)


async def test_stats_beat_while_idle_and_cost_next_to_nothing():
    async with running() as client:
        frontend = Frontend()
        await client.add(make_request(0, list(range(40)), 3))
        await frontend.until(client, 0)
        outputs = client.outputs()
        await asyncio.wait_for(anext(outputs), 60)
        before, start = cpu_seconds(client.pid), time.monotonic()
        beats = [await asyncio.wait_for(anext(outputs), 60) for _ in range(3)]
        share = (cpu_seconds(client.pid) - before) / (time.monotonic() - start)
        assert share < 0.05, f"{share:.0%} of a core while idle"
        reports = [beat.report for beat in beats]
        assert [report.seq for report in reports] == sorted({report.seq for report in reports})
        assert reports[-1].prefill_tokens_per_s > 0 and reports[-1].decode_step_s > 0
        assert reports[-1].num_requests_running == 0 and reports[-1].waiting == 0
        assert reports[0].prompt_tokens_per_s > reports[-1].prompt_tokens_per_s > 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.req("IPC-11")
async def test_a_crash_is_an_error_that_says_why():
    async with running() as client:
        await client.add(make_request(0, [CRASHING_TOKEN], 5))
        with pytest.raises(CoreError, match="the device is on fire"):
            await Frontend().until(client, 0)


@pytest.mark.req("IPC-11")
async def test_a_killed_core_is_an_error_for_readers_and_writers():
    async with running() as client:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(CoreError, match="signal 9"):
            async for _ in client.outputs():
                pass
        with pytest.raises(CoreError, match="signal 9"):
            await client.add(make_request(0, [1], 5))
        await client.abort([0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 3}, "needs 64 / 4 tokens = 16; what there is fits --max-model-len 8"),
        # An address of documentation, which no machine has.
        (
            {"events_addresses": ["tcp://127.0.0.1:*"], "replay_addresses": ["tcp://192.0.2.1:5558"]},
            "--replay-port: tcp://192.0.2.1:5558",
        ),
    ],
)
async def test_a_core_that_cannot_start_says_why_in_a_sentence(change, message):
    addresses = {name: value for name, value in change.items() if name.endswith("addresses")}
    config = make_config(**{name: value for name, value in change.items() if name not in addresses})
    with pytest.raises(ConfigError, match=message):
        async with running(config, **addresses):
            pass


async def test_signals_for_the_group_do_not_reach_the_core_and_close_does():
    async with running() as client:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGTERM)
        os.kill(client.pid, signal.SIGINT)
        frontend = Frontend()
        await client.add(make_request(0, [1], 5))
        await frontend.until(client, 0)
    assert not alive(client.pid)


async def test_the_core_dies_with_its_frontend():
    """Even while the frontend is killed, and so can tell nobody."""
    script = (
        "import asyncio, sys\n"
        "from harness import make_config\n"
        "from penstock.engine.core.ipc.client import CoreClient\n"
        "async def main():\n"
        f"    client = CoreClient(make_config(), runner={RUNNER!r})\n"
        "    await client.start()\n"
        "    assert 'torch' not in sys.modules\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    frontend = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    try:
        assert frontend.stdout is not None
        core = int(await asyncio.wait_for(frontend.stdout.readline(), 60))
        assert alive(core)
    finally:
        frontend.kill()
        await frontend.wait()
    deadline = time.monotonic() + 60
    while alive(core) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert not alive(core)


class Subscriber:
    """Follows the event stream and keeps the set of cached blocks."""

    def __init__(self, context: zmq.asyncio.Context, events_address: str, replay_address: str) -> None:
        self._sub, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.subscribe(events.TOPIC)
        self._sub.connect(events_address)
        self._replay.connect(replay_address)
        self.blocks: set[bytes] = set()
        self.finished: dict[str, RequestFinished] = {}
        self.reports: list[LoadReport] = []
        self.seqs: list[int] = []

    async def follow(self, done) -> None:
        while not done(self):
            topic, seq, payload = await asyncio.wait_for(self._sub.recv_multipart(), 60)
            assert topic == events.TOPIC
            self.seqs.append(events.decode_seq(seq))
            self.take(payload)

    async def replay(self, start: int) -> list[int]:
        await self._replay.send(events.encode_seq(start))
        seqs = []
        while (message := await asyncio.wait_for(self._replay.recv_multipart(), 60)) != [events.END_OF_REPLAY, b""]:
            seqs.append(events.decode_seq(message[0]))
            self.take(message[1])
        return seqs

    def take(self, payload: bytes) -> None:
        for event in events.decode(payload).events:
            match event:
                case BlockStored(hashes):
                    self.blocks |= set(hashes)
                case BlockRemoved(hashes):
                    self.blocks -= set(hashes)
                case AllBlocksCleared():
                    self.blocks = set()
                case RequestFinished():
                    self.finished[event.request_id] = event
                case LoadReport():
                    self.reports.append(event)


def told_by_vllms(batches: list) -> set[bytes]:
    """What batches of vLLM's form leave cached, by hashes made anew of their tokens, as readers do."""
    own: dict[int, bytes] = {}
    for _, found, rank in batches:
        assert rank == 0
        for event in found:
            if event["type"] == "BlockStored":
                assert (event["block_size"], event["medium"], event["lora_name"]) == (4, "GPU", None)
                parent = event["parent_block_hash"]
                keys = event["extra_keys"]
                salt = keys[0][0] if keys and keys[0] else None
                assert not keys or (keys[1:] == [None] * (len(keys) - 1) and parent is None)
                chain = BlockHasher(4, "penstock").chain(
                    None if parent is None else own[parent], event["token_ids"], ExtraKeys(cache_salt=salt), 0
                )
                own.update(zip(event["block_hashes"], chain, strict=True))
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del own[name]
            else:
                own.clear()
    return set(own.values())


async def vllms_replay(socket: zmq.asyncio.Socket) -> list:
    """All batches that the socket answers, decoded."""
    await socket.send_multipart([b"", events.encode_seq(0)])
    batches = []
    while (message := await asyncio.wait_for(socket.recv_multipart(), 60)) != [b"", b"", events.END_OF_REPLAY, b""]:
        assert message[:3] == [b"", b"kv@pod@tiny", events.encode_seq(len(batches))]
        batches.append(msgspec.msgpack.decode(message[3]))
    return batches


@pytest.mark.req("PC-14", "PC-07")
async def test_the_event_stream_tells_what_is_cached_and_replays_it(tmp_path):
    addresses = {"events_addresses": [f"ipc://{tmp_path}/events"], "replay_addresses": [f"ipc://{tmp_path}/replay"]}
    told = {"endpoint": f"ipc://{tmp_path}/vllm", "replay_endpoint": f"ipc://{tmp_path}/again", "topic": "kv@pod@tiny"}
    context = zmq.asyncio.Context()
    try:
        async with running(kv_events=KVEventsConfig(**told), **addresses) as client:
            live, frontend = Subscriber(context, *(address for (address,) in addresses.values())), Frontend()
            await live.follow(lambda one: one.reports)
            prompt = list(range(20))
            await client.add(make_request(0, prompt, 6))
            await frontend.until(client, 0)
            await client.add(msgspec.structs.replace(make_request(1, prompt, 6), arrival_time=time.time()))
            await client.add(make_request(2, prompt, 6, salt="other"))
            await frontend.until(client, 1, 2)
            await live.follow(lambda one: {"r0", "r1", "r2"} <= set(one.finished))
            assert live.seqs == list(range(live.seqs[0], live.seqs[-1] + 1)), "gaps"
            # 26 tokens, of which the last one was never computed; salted ones are other blocks.
            hasher, whole = BlockHasher(4, "penstock"), prompt + reference(prompt, 6)
            assert set(hasher.hash(whole[:25])) <= live.blocks and len(live.blocks) == 12
            assert frontend.cached == {0: 0, 1: 16, 2: 0}
            ttft_s = live.finished["r1"].ttft_s
            assert 0 < ttft_s < 60
            assert live.finished["r1"] == RequestFinished("r1", "length", 20, 16, 6, ttft_s)
            # From the start, from a future that this epoch does not know, and from the newest on: the same picture.
            late, lost = (
                Subscriber(context, *(address for (address,) in addresses.values())),
                Subscriber(context, *(address for (address,) in addresses.values())),
            )
            seqs = await late.replay(0)
            assert seqs == list(range(len(seqs))) and late.blocks == live.blocks and set(late.finished) == set(live.finished)
            (snapshot,) = await lost.replay(10**6)
            assert lost.blocks == live.blocks and snapshot >= live.seqs[-1]
            assert all(seq > snapshot for seq in await lost.replay(snapshot + 1))
            # vLLM's form of it: names that mean nothing by themselves, and the tokens.
            theirs = context.socket(zmq.DEALER)
            theirs.connect(told["replay_endpoint"])
            assert told_by_vllms(await vllms_replay(theirs)) == live.blocks
            cleared = asyncio.create_task(client.call(ResetPrefixCache()))
            await asyncio.gather(live.follow(lambda one: not one.blocks), consume(client, cleared))
            assert not told_by_vllms(await vllms_replay(theirs))
    finally:
        context.destroy(linger=0)
