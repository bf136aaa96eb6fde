"""The core with its model in processes of their own, and every way in which one of them can fail the others."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from fake_runner import reference
from harness import make_config, make_request
from rank_runners import DYING_TOKEN, LONE_LOSS_TOKEN, LOST_TOKEN, OTHER_TOKEN, STUCK_TOKEN

from penstock.engine.commands import ReloadWeights
from penstock.engine.config import ConfigError, EngineConfig, ParallelConfig, TransferConfig
from penstock.engine.core.ipc.client import CoreClient, CoreError
from penstock.engine.core.ipc.inproc import InprocClient
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.core.plan import SampleInputs
from penstock.engine.messages import Control, StepOutputs
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.fingerprint import Fingerprint, check_same, fingerprint
from penstock.engine.parallel.process_executor import ProcessExecutor

RUNNER = "rank_runners:RankRunner"
TIMEOUT_S = 1.5


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    folder = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{folder.parent / 'core'}")


def config_of(world: int, depth: int = 1):
    parallel = ParallelConfig(tensor_parallel_size=world, timeout=TIMEOUT_S, worker_process=True)
    return msgspec.structs.replace(make_config(depth=depth), parallel=parallel)


class Engine:
    """A core turned by hand whose model is elsewhere."""

    def __init__(self, world: int, depth: int = 1, config: EngineConfig | None = None, runner: str = RUNNER) -> None:
        config = config or config_of(world, depth)
        executor, blocks = build_executor(config, runner)
        assert isinstance(executor, ProcessExecutor)
        self.executor, self.core = executor, build_core(config, executor, blocks, epoch=1)
        self.streams: dict[int, list[int]] = {}
        self.errors: dict[int, str | None] = {}

    def run(self, *requests: tuple[int, list[int], int]) -> None:
        """Adds requests of these numbers, prompts and outputs, and turns the core until all have ended."""
        for index, prompt, count in requests:
            self.core.handle(make_request(index, prompt, count))
        ends = len(self.errors) + len(requests)
        while len(self.errors) < ends:
            self.take(self.core.step())

    def take(self, frame: StepOutputs | None) -> None:
        if frame is None:
            return
        indexes = memoryview(frame.indexes).cast("q").tolist()
        tokens, offsets = memoryview(frame.token_ids).cast("i"), memoryview(frame.offsets).cast("i")
        for at, index in enumerate(indexes):
            self.streams.setdefault(index, []).extend(tokens[offsets[at] : offsets[at + 1]].tolist())
        self.errors |= {finished.index: finished.error for finished in frame.finished}


@pytest.fixture
def start(request):
    """`start(world, depth)`: an engine that is closed after the test."""

    def make(world: int, depth: int = 1) -> Engine:
        engine = Engine(world, depth)
        request.addfinalizer(engine.executor.close)
        return engine

    return make


def children() -> set[str]:
    return {pid for told in Path("/proc/self/task").glob("*/children") for pid in told.read_text().split()}


def gone(pids: list[int]) -> bool:
    """Whether none of them is a process any more, not even one that nobody has waited for."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.req("IPC-07", "IPC-09")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_streams_are_those_of_one_process(start, world, depth):
    engine = start(world, depth)
    pids = engine.executor.pids
    assert len({os.getpid(), *pids}) == world + 1
    assert engine.executor.call("kernels") == [f"fake in process {pid}" for pid in pids]
    engine.run(*((index, [index, 1, 2, 3], 9) for index in range(6)))
    engine.run((6, list(range(20)), 5))
    assert engine.streams == {index: reference([index, 1, 2, 3], 9) for index in range(6)} | {6: reference(list(range(20)), 5)}
    engine.executor.check()
    engine.core.close()
    assert gone(pids)


def test_a_step_that_fails_on_every_rank_costs_its_requests_alone(start):
    engine = start(2)
    engine.run((0, [LOST_TOKEN], 4), (1, [1, 2], 4))
    assert "there is no room" in str(engine.errors[0])
    engine.run((2, [5, 6], 4))
    assert engine.streams[2] == reference([5, 6], 4)


@pytest.mark.req("DX-24")
@pytest.mark.parametrize(
    ("token", "told"),
    [
        (OTHER_TOKEN, r"rank 2 and rank 0 disagree about the tokens of step \d+"),
        (DYING_TOKEN, r"rank 2 \(process \d+\) ended with exit status 7"),
        (LONE_LOSS_TOKEN, r"rank 2 alone has lost a step: step \d+ failed: there is no room"),
        (STUCK_TOKEN, r"rank 2 \(process \d+\) hangs: nothing has moved for 1.5 seconds"),
    ],
)
def test_a_rank_that_fails_ends_the_group_by_name(start, token, told):
    engine = start(3)
    pids, began = engine.executor.pids, time.monotonic()
    with pytest.raises(GroupFailed, match=told):
        engine.run((0, [1, token], 4))
    assert gone(pids) and time.monotonic() - began < 20 * TIMEOUT_S


@pytest.mark.req("DX-24")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("idle", [False, True])
def test_a_rank_that_is_killed_or_stopped_ends_the_group_by_name(start, number, idle):
    engine = start(2)
    pids = engine.executor.pids
    engine.run((0, [1, 2], 3))
    if not idle:
        engine.core.handle(make_request(1, [3, 4], 30))
        engine.core.step()
    os.kill(pids[1], number)
    how = "was killed by signal 9" if number == signal.SIGKILL else "hangs: nothing has moved for 1.5 seconds"
    if idle and number == signal.SIGKILL:
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)
        with pytest.raises(GroupFailed, match=rf"rank 1 \(process {pids[1]}\) {how}"):
            engine.core.check()
    else:
        with pytest.raises(GroupFailed, match=rf"rank 1 \(process {pids[1]}\) {how}"):
            engine.core.check()  # may or may not see the end of a process at once
            engine.run((2, [5], 20))
    assert gone(pids)


@pytest.mark.req("IPC-09")
def test_calls_are_refused_together_or_not_at_all(start):
    engine = start(2)
    pids = engine.executor.pids
    with pytest.raises(ConfigError, match="/elsewhere has other shapes"):
        engine.executor.call("reload_weights", "/elsewhere")
    with pytest.raises(OSError, match="the disk is gone"):
        engine.executor.call("reload_weights", "/broken")
    engine.run((0, [1], 3))
    with pytest.raises(GroupFailed, match="rank 1 alone has refused reload_weights: /lone has other shapes"):
        engine.executor.call("reload_weights", "/lone")
    assert gone(pids)


def test_weights_that_one_rank_lacks_are_refused_and_the_group_goes_on(start):
    engine = start(2)
    for path, words in (("/lone", "/lone has other shapes"), ("/elsewhere", "/elsewhere has other shapes"), (None, None)):
        engine.core.handle(Control(1, ReloadWeights(path)))
        while not (replies := engine.core.take_replies()):
            engine.take(engine.core.step())
        assert replies[0].error == words
        engine.run((len(engine.errors), [1, 2, 3], 4))
    assert all(stream == reference([1, 2, 3], 4) for stream in engine.streams.values())


def test_the_time_of_towers_is_that_of_all_stages(request):
    """A rank of each counts: those of a stage encode at the same time."""
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, timeout=TIMEOUT_S)
    config = msgspec.structs.replace(make_config(depth=2), parallel=parallel)
    engine = Engine(4, config=config, runner="rank_runners:SeeingRunner")
    request.addfinalizer(engine.executor.close)
    engine.run((0, [1, 2, 3], 8))
    assert engine.streams[0] == reference([1, 2, 3], 8)
    assert engine.core.scheduler.encoder.seconds == 101 * 8


def test_calls_beside_steps_do_not_wait_for_them(start):
    engine = start(2)
    engine.core.handle(make_request(0, [STUCK_TOKEN], 3))
    plan = engine.core.scheduler.schedule(time.time())
    assert plan is not None
    engine.executor.submit(plan, masked=True)
    assert engine.executor.call_beside("take_reads") == [{}, {}]


def test_a_forward_pass_begins_before_its_masks_are_there(start, eventually, tmp_path, monkeypatch):
    """The core fills them meanwhile."""
    begun = tmp_path / "begun"
    monkeypatch.setenv("PENSTOCK_TEST_BEGUN", str(begun))
    engine = start(1)
    engine.core.handle(make_request(0, [1, 2], 3))
    plan = engine.core.scheduler.schedule(time.time())
    assert plan is not None
    engine.executor.submit(plan, masked=True)
    eventually(begun.exists)
    engine.executor.sample(SampleInputs(plan.step_id))
    assert engine.executor.collect().step_id == plan.step_id


def test_steps_without_masks_are_one_message(start, monkeypatch):
    """Each wakes all ranks, and has to be decoded by each of them."""
    engine, sent = start(2), []
    node = engine.executor._nodes[0]
    send = node.send
    monkeypatch.setattr(node, "send", lambda order: (sent.append(order), send(order)))
    engine.run((0, [1, 2, 3], 9))
    assert len(sent) == engine.core.num_steps == 9


@pytest.mark.req("DX-24")
@pytest.mark.parametrize("phase", ["load", "profile_memory", "warm_up"])
def test_a_rank_that_is_killed_while_it_starts_ends_the_others(monkeypatch, phase):
    monkeypatch.setenv("PENSTOCK_TEST_FALLS", phase)
    before = children()
    with pytest.raises(GroupFailed, match=r"rank 1 \(process \d+\) was killed by signal 9"):
        build_executor(config_of(2), "rank_runners:FallingRunner")
    assert children() <= before


@pytest.mark.slow
def test_many_starts_leave_nothing_behind(monkeypatch):
    # A folder of the test's own: ranks of other tests come and go meanwhile. A short one, as sockets lie in it.
    folder = tempfile.TemporaryDirectory(prefix="own-")
    monkeypatch.setattr(tempfile, "tempdir", folder.name)

    def left() -> tuple[int, int, int]:
        files = len(list(Path("/proc/self/fd").iterdir()))
        return files, len(list(Path("/dev/shm").iterdir())), len(list(Path(folder.name).iterdir()))

    before = left()
    for number in range(9):
        executor = ProcessExecutor(config_of(2), RUNNER)
        pids = executor.pids
        if number % 3 == 0:
            executor.call("load")
        if number % 3 == 1:
            os.kill(pids[number % 2], signal.SIGKILL)
        executor.close()
        executor.close()
        assert gone(pids)
    assert left() == before == (*before[:2], 0)
    folder.cleanup()


def test_ranks_that_are_not_alike_are_refused_by_what_differs():
    with pytest.raises(ConfigError, match=r"^rank 1 differs from rank 0 in its torch: 0\.1 there, \S+ on rank 0$"):
        ProcessExecutor(config_of(2), "rank_runners:OtherTorch")
    with pytest.raises(GroupFailed, match="rank 1 cannot go on: RuntimeError: there is no such device"):
        ProcessExecutor(config_of(2), "rank_runners:Unbuilt")
    assert not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()


def test_whatever_differs_has_a_name(tmp_path):
    config = msgspec.structs.replace(make_config(), model=msgspec.structs.replace(make_config().model, path=tmp_path))
    (tmp_path / "config.json").write_text("{}")
    here = fingerprint(config)
    check_same([here, here])
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ConfigError, match="rank 2 differs from rank 0 in its checkpoint: "):
        check_same([here, here, fingerprint(config)])
    with pytest.raises(ConfigError, match="rank 1 differs from rank 0 in its instruction set: portable there"):
        check_same([here, fingerprint(msgspec.structs.replace(config, cpu_isa="portable"))])
    with pytest.raises(ConfigError, match="rank 1 differs from rank 0 in its setting seed: 5 there, 0 on rank 0"):
        check_same([fingerprint(config), fingerprint(msgspec.structs.replace(config, seed=5))])


def test_nodes_lend_pages_at_addresses_of_their_own_and_with_the_same_secret(tmp_path):
    def lends(node: int, secret: str) -> Fingerprint:
        file = tmp_path / f"{node} {secret}"
        file.write_text(f"a secret of many bytes: {secret}")
        transfer = TransferConfig(role="kv_both", engine_id=f"drawn on {node}", secret=file, host=f"10.0.0.{node}")
        return fingerprint(msgspec.structs.replace(make_config(), transfer=transfer))

    check_same([lends(0, "ours"), lends(1, "ours")])
    with pytest.raises(ConfigError, match="rank 1 differs from rank 0 in its KV transfer secret: ") as error:
        check_same([lends(0, "ours"), lends(1, "theirs")])
    assert "many bytes" not in str(error.value)


async def test_the_death_of_a_rank_is_told_to_the_frontend_and_is_the_cores_end():
    client = CoreClient(config_of(2), runner=RUNNER)
    try:
        await client.start()
        children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if "parallel.worker" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        with pytest.raises(CoreError, match=rf"rank 0 \(process {ranks[0]}\) was killed by signal 9"):
            async for _ in client.outputs():
                pass
    finally:
        await client.close()
    assert gone(ranks)


async def test_the_death_of_a_rank_is_the_end_of_a_core_in_ones_own_process_too():
    client = InprocClient(config_of(2), runner=RUNNER)
    try:
        await client.start()
        ranks = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(CoreError, match=rf"rank 1 \(process {ranks[1]}\) was killed by signal 9"):
            async for _ in client.outputs():
                pass
    finally:
        await client.close()
    assert gone(ranks)


async def test_ranks_end_with_a_core_that_is_killed(eventually, monkeypatch):
    folder = tempfile.TemporaryDirectory(prefix="own-")
    monkeypatch.setattr(tempfile, "tempdir", folder.name)
    monkeypatch.setenv("TMPDIR", folder.name)
    client = CoreClient(config_of(2), runner=RUNNER)
    try:
        await client.start()
        children = [int(pid) for pid in Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()]
        os.kill(client.pid, signal.SIGKILL)
        eventually(lambda: gone(children))
    finally:
        await client.close()
    assert not list(Path(folder.name).iterdir()), "nor is a folder left"
    folder.cleanup()
