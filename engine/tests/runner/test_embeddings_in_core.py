"""The real scheduler, cache and runner together: embeddings have the same bits alone and in a crowd that is chunked, cached,
preempted and planned ahead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from embedding_models import MODES, write_modules
from stages_here import Stages
from test_pipeline_parallel import config_of

from penstock.engine.args import EngineArgs
from penstock.engine.config import SchedulerConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import InlineExecutor, ThreadExecutor
from penstock.engine.messages import AbortRequests, AddRequest, Finished, FinishReason
from penstock.engine.sampling import SamplingParams

NUM_BLOCKS, CONTEXT = 30, 320
SCHEDULER = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, watermark=0.0)


def requests() -> list[AddRequest]:
    """Ten, some with a common prefix, and one that fills the context."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, 257, 64).tolist()
    texts = [common * (at % 3 > 0) + rng.integers(0, 257, int(rng.integers(1, 60))).tolist() for at in range(9)]
    texts.append(rng.integers(0, 257, CONTEXT).tolist())
    return [AddRequest(at, f"r{at}", text, SamplingParams(max_tokens=1), float(at)) for at, text in enumerate(texts)]


class Engine:
    """A core, and what it has told."""

    def __init__(self, runner: Any, depth: int, num_blocks: int) -> None:
        if isinstance(runner, Stages):
            runner.call("warm_up")
            executor = runner
        else:
            runner.warm_up()
            executor = InlineExecutor(runner) if depth == 1 else ThreadExecutor(runner)
        self.core = EngineCore(msgspec.structs.replace(runner.config, depth=depth), executor, num_blocks, epoch=1)
        self.vectors: dict[int, bytes] = {}
        self.finished: list[Finished] = []

    def step(self) -> None:
        frame = self.core.step()
        if frame is None:
            return
        assert frame.indexes == frame.token_ids == b""
        self.finished += frame.finished
        if frame.pooled is not None:
            rows = np.frombuffer(frame.pooled.vectors, "<f4").reshape(-1, frame.pooled.size)
            for index, row in zip(np.frombuffer(frame.pooled.indexes, "<i8").tolist(), rows, strict=True):
                assert index not in self.vectors
                self.vectors[index] = row.tobytes()

    def run(self, batch: list[AddRequest]) -> dict[int, bytes]:
        for request in batch:
            self.core.handle(request)
        while self.core.has_work:
            self.step()
        return self.vectors


@pytest.fixture(scope="module", params=list(MODES))
def path(request: Any, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    transformers.AutoModel.from_pretrained(checkpoint("qwen3")).save_pretrained(folder)
    return write_modules(folder, MODES[request.param], 64)


@pytest.fixture(scope="module")
def alone(path: Path, build_runner: Any) -> dict[int, bytes]:
    """Each request's embedding with nobody else there and nothing cached."""
    runner = build_runner(path, scheduler=SCHEDULER)
    found: dict[int, bytes] = {}
    for request in requests():
        found |= Engine(runner, 1, NUM_BLOCKS).run([request])
    assert len(found) == 10 and len(set(found.values())) > 4
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_changes_no_bit(path: Path, alone: dict[int, bytes], build_runner: Any, depth: int) -> None:
    engine = Engine(build_runner(path, scheduler=SCHEDULER), depth, NUM_BLOCKS)
    assert engine.run(requests()) == alone
    assert [end.reason for end in engine.finished] == [FinishReason.STOP] * 10
    scheduler = engine.core.scheduler
    assert scheduler.num_running == 0 and not scheduler.has_work
    # Only the last token's hidden state can do without those before it.
    assert (scheduler.totals.prefix_hits > 0) == path.name.startswith("last")

    again = engine.run([msgspec.structs.replace(one, index=one.index + 10) for one in requests()])
    assert {index - 10: vector for index, vector in again.items() if index >= 10} == alone


@pytest.mark.req("DX-09")
def test_the_last_stage_of_a_pipeline_pools(path: Path, alone: dict[int, bytes]) -> None:
    stages = Stages(config_of(path, 2))
    assert Engine(stages, 2, NUM_BLOCKS).run(requests()) == alone
    assert all(runner.model.lm_head is None for runner in stages.runners)
    assert EngineArgs(model=str(path), device="cpu", pipeline_parallel_size=2).config().model.pooling is not None


def test_whoever_is_preempted_amid_its_prompt_ends_with_the_same_bits(
    path: Path, alone: dict[int, bytes], build_runner: Any
) -> None:
    engine = Engine(build_runner(path, scheduler=SCHEDULER), 1, NUM_BLOCKS)
    for request in requests():
        engine.core.handle(request)
    for _ in range(4):
        engine.step()
        engine.core.scheduler.preempt_all(0.0)
    assert engine.core.scheduler.totals.num_preemptions > 0 and engine.core.scheduler.totals.preempted_tokens > 48
    while engine.core.has_work:
        engine.step()
    assert engine.vectors == alone


def test_whoever_leaves_amid_its_prompt_is_told_of_no_vector(path: Path, alone: dict[int, bytes], build_runner: Any) -> None:
    engine = Engine(build_runner(path, scheduler=SCHEDULER), 1, NUM_BLOCKS)
    long = requests()[9]
    engine.core.handle(long)
    engine.step()
    engine.core.handle(AbortRequests([long.index]))
    assert engine.run(requests()[:3]) == {index: alone[index] for index in range(3)}
    assert (engine.finished[0].index, engine.finished[0].reason) == (9, FinishReason.ABORT)


def test_one_token_more_than_the_context_is_too_long(path: Path, build_runner: Any) -> None:
    engine = Engine(build_runner(path, scheduler=SCHEDULER), 1, NUM_BLOCKS)
    assert engine.run([AddRequest(0, "r", [1] * (CONTEXT + 1), SamplingParams(max_tokens=1), 0.0)]) == {}
    assert [end.reason for end in engine.core.scheduler.take_outputs().finished] == [FinishReason.IGNORED]
