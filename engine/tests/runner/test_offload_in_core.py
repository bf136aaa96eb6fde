"""Pages in the host's memory with a real model: what comes back has the bits that went there."""

import os
import threading
import time

import msgspec
import numpy as np
import pytest
import torch
from test_core_with_runner import SCHEDULER, requests

from penstock.engine.config import ConfigError
from penstock.engine.connectors.host_pages import HostPages
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import executor_of
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.core.memory import OffloadSize
from penstock.engine.core.plan import Transfers, ints


class Engine:
    """A core with little room in its cache and a lot in the host's memory."""

    def __init__(self, runner, depth: int, num_blocks: int, pages: int) -> None:
        runner.warm_up()
        layout, config = runner.kv_layout(), msgspec.structs.replace(runner.config, depth=depth)
        runner.initialize_kv_cache(num_blocks)
        runner.initialize_offload(pages)
        self.executor = executor_of(config, runner)
        offload = OffloadSize(pages, layout.page_bytes)
        self.core = EngineCore(config, self.executor, num_blocks, epoch=1, groups=layout.groups, offload=offload)
        self.tokens: dict[int, list[int]] = {}

    def run(self, batch) -> dict[int, list[int]]:
        self.tokens = {request.index: [] for request in batch}
        for request in batch:
            self.core.handle(request)
        while self.core.has_work:
            if (frame := self.core.step()) is not None:
                offsets, ids = memoryview(frame.offsets).cast("i"), memoryview(frame.token_ids).cast("i")
                for at, index in enumerate(memoryview(frame.indexes).cast("q")):
                    self.tokens[index] += ids[offsets[at] : offsets[at + 1]]
        return self.tokens


@pytest.mark.req("KO-02", "KO-22", "KO-23", "KO-24")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("family", "num_blocks"), [("llama", 24), ("gemma2", 44)])
def test_prompts_that_left_the_cache_come_back_with_the_same_tokens(checkpoint, build_runner, family, num_blocks, depth):
    """Twice over, in a cache with room for about two of ten requests."""
    batch = requests(adjusted=False)
    plain = Engine(build_runner(checkpoint(family), scheduler=SCHEDULER), 1, 200, 1)
    engine = Engine(build_runner(checkpoint(family), scheduler=SCHEDULER), depth, num_blocks, 400)
    try:
        expected = plain.run(batch)
        assert engine.run(batch) == expected and engine.run(batch) == expected
        found = engine.core.stats().offload
        assert found is not None and found.memory.loaded_bytes > 0 and found.memory.load_s > 0 and found.memory.failed_pages == 0
        assert engine.core.stats().preemptions > 0, "requests lose blocks that are still to be copied"
        assert found.memory.stored_bytes % engine.core._offload._page_bytes == 0 and found.memory.pages_used > num_blocks
    finally:
        plain.core.close()
        engine.core.close()


@pytest.mark.req("KO-14")
def test_copies_run_beside_the_rows_of_their_step_which_waits_for_them_even_if_it_breaks(checkpoint, build_runner, monkeypatch):
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    engine, batch = Engine(runner, 2, 24, 400), requests(adjusted=False)
    expected = dict(engine.run(batch))
    rows_run, copying, broken = threading.Event(), threading.Event(), list[int]()
    step_of, copy, states = runner._moved_and_run, runner._host_pages._copy, runner._states_of

    def copied(transfers):
        copying.set()
        assert rows_run.wait(20), "the rows wait for the copies"
        seconds = copy(transfers)
        copying.clear()
        return seconds

    def ran(step):
        rows_run.set()
        if not broken and step.plan.transfers is not None and len(step.plan.transfers.load_blocks) and len(step.plan.rows):
            broken.append(step.plan.step_id)
            raise RuntimeError("an operator is missing")
        return states(step)

    def stepped(step):
        rows_run.clear()
        try:
            return step_of(step)
        finally:
            assert not copying.is_set()

    monkeypatch.setattr(runner._host_pages, "_copy", copied)
    monkeypatch.setattr(runner, "_states_of", ran)
    monkeypatch.setattr(runner, "_moved_and_run", stepped)
    again = engine.run(batch)
    assert broken, "a step with loads and rows has failed"
    lost = [index for index, tokens in again.items() if tokens != expected[index]]
    assert 0 < len(lost) < len(batch) and engine.core.stats().offload.memory.failed_pages > 0
    assert engine.core.scheduler.kv.num_pinned_blocks == 0
    assert engine.run(batch) == expected, "nothing of the broken step is in a cache"


def test_each_page_that_comes_back_is_the_one_that_went(checkpoint, build_runner):
    """Byte by byte, whatever was in the block meanwhile."""
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    runner.initialize_kv_cache(20)
    runner.initialize_offload(8)
    pages = runner._pages.flatten(1)
    pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    before = pages.clone()

    def array(*values: int):
        return torch.tensor(values, dtype=torch.int32).numpy()

    runner._host_pages.begin(Transfers(array(3, 7, 19), array(0, 5, 2), array(), array())).result()
    pages.zero_()
    moved = Transfers(array(), array(), array(4, 3), array(5, 2))
    runner._host_pages.begin(moved).result()
    assert torch.equal(pages[4], before[7]) and torch.equal(pages[3], before[19])
    others = [block for block in range(20) if block not in ints(moved.load_blocks)]
    assert not pages[others].any()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="there is one core")
def test_pages_are_copied_on_another_core_than_the_step_that_they_are_beside():
    cores, pages = os.sched_getaffinity(0), HostPages(torch.zeros(1, 8, dtype=torch.uint8), 1)
    nothing = np.empty(0, np.int32)

    def copied_on(core: int) -> int:
        os.sched_setaffinity(0, {core})
        pages._thread.submit(os.sched_setaffinity, 0, {core}).result()
        pages.begin(Transfers(nothing, nothing, nothing, nothing)).result()
        return pages._thread.submit(pages._core).result()

    try:
        assert all(copied_on(core) != core for core in list(cores)[:2])
    finally:
        os.sched_setaffinity(0, cores)


def test_pages_are_copied_where_the_process_has_lost_its_other_cores(monkeypatch):
    pages, nothing = HostPages(torch.zeros(1, 8, dtype=torch.uint8), 1), np.empty(0, np.int32)
    monkeypatch.setattr(pages, "_cores", {0, 1 << 20})  # one that no machine has: the kernel refuses it as one that is lost
    monkeypatch.setattr(pages, "_core", lambda: 0)
    pages.slots[0] = 7
    pages.begin(Transfers(nothing, nothing, np.zeros(1, np.int32), np.zeros(1, np.int32))).result()
    assert (pages._pages == 7).all()


def test_an_engine_is_built_with_as_many_pages_as_the_setting_holds(checkpoint, build_runner):
    config = build_runner(checkpoint("llama"), scheduler=SCHEDULER).config

    def built(size: int):
        cache = msgspec.structs.replace(config.cache, num_blocks=60, offload_bytes=size)
        return build_executor(msgspec.structs.replace(config, cache=cache)), cache

    page = build_runner(checkpoint("llama"), scheduler=SCHEDULER).kv_layout().page_bytes
    (executor, num_blocks), cache = built(9 * page + 5)
    core = build_core(msgspec.structs.replace(config, cache=cache), executor, num_blocks, 1)
    try:
        found = core.stats().offload
        assert found is not None and (found.memory.pages, found.memory.pages_used) == (9, 0)
    finally:
        core.close()
    with pytest.raises(ConfigError, match=f"--kv-offload-memory-bytes {page - 1} holds no page"):
        built(page - 1)
    with pytest.raises(ConfigError, match=r"--kv-offload-memory-bytes .* does not fit beside the KV cache"):
        built(1 << 50)


def test_pages_are_forgotten_when_the_cache_sleeps_and_come_again_afterwards(checkpoint, build_runner):
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    engine, batch = Engine(runner, 1, 24, 400), requests(adjusted=False)[:5]
    expected = dict(engine.run(batch))
    assert engine.core.scheduler.kv.reset()
    runner.sleep(1)
    assert not runner._pages.numel(), "the cache's memory is given back"
    runner.wake_up(["kv_cache"])
    assert engine.core.stats().offload.memory.pages_used == 0
    assert engine.run(batch) == expected and engine.core.stats().offload.memory.stored_bytes > 0


def test_an_engine_that_chooses_by_cost_learns_from_its_own_steps_and_loads(checkpoint, build_runner):
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    by_cost = msgspec.structs.replace(runner.config.cache, loads_by_cost=True)
    runner.config = msgspec.structs.replace(runner.config, cache=by_cost)
    engine, batch = Engine(runner, 1, 24, 400), requests(adjusted=False)[:5]
    costs = engine.core._offload._costs
    assert costs._saved_s(0, 1000, 1) is None
    expected = dict(engine.run(batch))
    assert costs._saved_s(0, 1000, 1) is not None, "it may be 0: on a busy machine five prompts need not tell long from short"
    assert engine.run(batch) == expected, "those that came back from the host's memory, and those that were computed"
    now = time.time()
    assert costs.memory.seconds(4, now) is not None and costs.memory.seconds(4, now) < 60
