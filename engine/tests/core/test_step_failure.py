"""A step that fails takes its own requests with it and nothing else."""

import numpy as np
import pytest
from fake_runner import COUGHING_TOKENS, CoughingRunner, reference
from harness import make_config, make_request

from penstock.engine.core.core import MAX_FAILURES, EngineCore
from penstock.engine.core.executor import InlineExecutor, StepFailed, ThreadExecutor
from penstock.engine.messages import Finished


def make_core(depth: int) -> EngineCore:
    config = make_config(depth=depth, max_num_seqs=2)
    runner = CoughingRunner(config)
    assert config.cache.num_blocks is not None
    runner.initialize_kv_cache(config.cache.num_blocks)
    executor = InlineExecutor(runner) if depth == 1 else ThreadExecutor(runner)
    return EngineCore(config, executor, config.cache.num_blocks, epoch=7)


def run(core: EngineCore) -> tuple[dict[int, list[int]], dict[int, Finished]]:
    streams: dict[int, list[int]] = {}
    finished: dict[int, Finished] = {}
    for _ in range(300):
        frame = core.step()
        if frame is not None:
            tokens, offsets = np.frombuffer(frame.token_ids, "<i4"), np.frombuffer(frame.offsets, "<i4")
            for at, index in enumerate(np.frombuffer(frame.indexes, "<i8").tolist()):
                streams.setdefault(index, []).extend(tokens[offsets[at] : offsets[at + 1]].tolist())
            finished |= {end.index: end for end in frame.finished}
        if not core.has_work:
            return streams, finished
    raise AssertionError("never done")


@pytest.mark.req("IPC-11")
@pytest.mark.parametrize("token", COUGHING_TOKENS)
@pytest.mark.parametrize("depth", [1, 2])
def test_its_requests_end_with_a_retriable_error_and_the_others_never_know(depth, token):
    core = make_core(depth)
    try:
        prompts = [[0] * 8 + [1], [0] * 8 + [token], [0] * 8 + [2], [0] * 8 + [3]]
        for index, prompt in enumerate(prompts):
            core.handle(make_request(index, prompt, 10))
        streams, finished = run(core)
        for index in (0, 1):  # there is room for two: they shared the step
            assert finished[index].code == "step_failed" and "coughed" in str(finished[index].error)
        for index in (2, 3):
            assert finished[index].error is None and streams[index] == reference(prompts[index], 10)
        core.handle(make_request(9, prompts[0], 10))
        streams, _ = run(core)
        assert streams[9] == reference(prompts[0], 10)
        assert core.scheduler.kv.pool.num_used == 0 and core.scheduler.num_running == 0
    finally:
        core.close()


@pytest.mark.req("IPC-11")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_core_whose_every_step_fails_gives_up(depth):
    core = make_core(depth)
    try:
        for index in range(8):
            core.handle(make_request(index, [COUGHING_TOKENS[0], index], 10))
        with pytest.raises(StepFailed, match="coughed"):
            run(core)
        assert core.num_steps == MAX_FAILURES
    finally:
        core.close()
