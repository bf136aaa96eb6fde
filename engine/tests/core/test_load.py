"""Speeds and rates of the load report, the number of blocks, the replay buffer and the executors."""

import re
import threading
import time

import msgspec
import pytest
from fake_runner import SLOW_TOKEN, FakeRunner, reference
from harness import Machine, make_config, make_request
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.cache.layout import KVGroup, KVLayout, full_attention
from penstock.engine.commands import ResetPrefixCache
from penstock.engine.config import CacheConfig, ConfigError
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import InlineExecutor, ThreadExecutor
from penstock.engine.core.ipc.publisher import ReplayBuffer
from penstock.engine.core.measure.load import RATE_WINDOW_S, LoadMeter, Rate
from penstock.engine.core.memory import Memory, check_at_start, measure_memory, num_kv_blocks
from penstock.engine.messages import Control, ControlDone


def test_a_steady_rate_is_read_as_it_is_and_fades_when_it_ends():
    rate = Rate()
    assert rate.at(0.0) == 0
    for step in range(1000):
        rate.add(5, step * 0.1)
    assert rate.at(99.9) == pytest.approx(50, rel=0.02)
    assert rate.at(99.9 + RATE_WINDOW_S) == pytest.approx(50 / 2.718, rel=0.03)


def test_a_moment_in_which_the_machine_stood_still_is_a_small_part_of_a_second_of_steps():
    meter = LoadMeter()
    for step in range(6001):
        meter.observe(step, seconds=0.05 if step == 6000 else 0.0005, prefill_tokens=0, sampled_tokens=1)
    assert 0.0005 < meter.decode_step_s < 0.00054


def test_long_steps_are_averaged_over_a_number_of_them():
    meter = LoadMeter()
    for step in range(300):
        meter.observe(step, seconds=0.03 if step < 200 else 0.06, prefill_tokens=0, sampled_tokens=1)
    assert 0.058 < meter.decode_step_s < 0.06


def test_prefill_speed_weighs_steps_by_their_tokens_and_decode_steps_do_not_count():
    meter = LoadMeter()
    assert meter.prefill_tokens_per_s == 0 and meter.decode_step_s == 0
    for step in range(200):
        meter.observe(step, seconds=0.5, prefill_tokens=1000, sampled_tokens=4)
        meter.observe(step, seconds=0.02, prefill_tokens=0, sampled_tokens=4)
        meter.observe(step, seconds=0.01, prefill_tokens=2, sampled_tokens=1)
    assert meter.prefill_tokens_per_s == pytest.approx(1002 / 0.51, rel=0.05)
    assert meter.decode_step_s == pytest.approx(0.02)
    assert meter.prompt_tokens_per_s(199) == pytest.approx(1002, rel=0.15)


def after_copies(held_up: float, share: float, steps: int = 40) -> LoadMeter:
    """After steps of 0.1 s beside which copies took a `share` of that, and held them up by `held_up` of what they took."""
    meter = LoadMeter()
    for step in range(50):
        meter.observe(step, seconds=0.1, prefill_tokens=0, sampled_tokens=4)
    for step in range(50, 50 + steps):
        if not meter.pace(0, 4).share:
            meter.observe(step, seconds=0.1, prefill_tokens=0, sampled_tokens=4)
        seconds = 0.1 * (1 + held_up * share)
        meter.observe(step, seconds=seconds, prefill_tokens=0, sampled_tokens=4, loaded_s=0.1 * share)
    return meter


def test_copies_beside_those_who_decode_take_little_until_it_is_known_that_they_hold_up_nobody():
    for new in (after_copies(0.0, 0.03, steps=0), after_copies(1.0, 0.03), after_copies(1.0, 0.5)):
        assert new.pace(0, 4).share == pytest.approx(0.02, rel=0.01), "two hundredths of a step"
    assert after_copies(0.2, 0.3).pace(0, 4).share == pytest.approx(0.1, rel=0.2), "they add a fifth of what they take"
    assert after_copies(0.0, 0.3, steps=390).pace(0, 4).share == pytest.approx(0.5, rel=0.01), "no more than half of a step"


def test_what_copies_add_is_learned_from_the_first_few_and_from_no_other_pause():
    meter = after_copies(0.0, 0.03, steps=30)
    assert meter.pace(0, 4).share > 0.05, "soon more"
    before = meter.pace(0, 4).share
    meter.observe(90, seconds=0.2, prefill_tokens=0, sampled_tokens=4, loaded_s=0.003)
    assert 0.6 * before < meter.pace(0, 4).share < before, "as if these copies had held it up, and by no more"


def test_steps_that_grow_longer_anyway_are_not_held_up_by_copies():
    meter = LoadMeter()
    for step in range(200):
        copied_s = 0.0 if step % 5 else 0.025
        meter.observe(step, seconds=0.1 * 1.003**step, prefill_tokens=0, sampled_tokens=4, loaded_s=copied_s)
    assert meter.pace(0, 4).share > 0.15


def test_a_step_that_has_waited_for_copies_does_not_say_what_decodes_take():
    meter = LoadMeter()
    meter.observe(0, seconds=0.1, prefill_tokens=0, sampled_tokens=4, stored_s=0.05, loaded_s=0.05)
    for waited in ({"stored_s": 0.29}, {"loaded_s": 0.29}):
        meter.observe(1, seconds=0.3, prefill_tokens=0, sampled_tokens=4, **waited)
    assert meter.decode_step_s == pytest.approx(0.1)


def test_a_step_without_copies_comes_again_where_each_could_have_some():
    """The steps have become shorter meanwhile: only such a step can show that copies hold them up."""
    meter = after_copies(0.0, 0.3, steps=15)
    assert meter.pace(0, 4).share > 0
    meter.observe(65, seconds=0.05, prefill_tokens=0, sampled_tokens=1, loaded_s=0.02)
    assert meter.pace(0, 4).share == 0 and meter.pace(100, 0).share == 0.5
    meter.observe(66, seconds=0.05, prefill_tokens=0, sampled_tokens=1)
    assert meter.pace(0, 4).share > 0


def test_who_only_computes_a_prompt_waits_for_no_copies_and_bears_them():
    meter = after_copies(1.0, 0.5)
    assert meter.pace(1000, 0).step_s == 0, "how fast prompts are computed is unknown"
    meter.observe(100, seconds=0.5, prefill_tokens=1000, sampled_tokens=0)
    assert meter.pace(1000, 0) == (pytest.approx(0.5), 0.5)


LAYOUT = KVLayout(full_attention(4), 1000)
ROOMY = Memory(10**9, 10**9, 0)


def test_the_time_of_a_step_is_foretold_from_its_chunks_and_decodes():
    meter = LoadMeter()
    assert meter.step_s(100, 0) == meter.step_s(0, 3) == 0, "unknown"
    meter.observe(0.0, seconds=0.1, prefill_tokens=100, sampled_tokens=0)
    assert meter.step_s(50, 0) == pytest.approx(0.05) and meter.step_s(50, 1) == 0
    meter.observe(0.1, seconds=0.02, prefill_tokens=0, sampled_tokens=8)
    assert meter.step_s(50, 1) == pytest.approx(0.07) and meter.step_s(0, 8) == pytest.approx(0.02)
    assert meter.step_s(0, 0) == 0


def with_cache(**cache):
    config = make_config(max_model_len=64)
    return type(config)(model=config.model, cache=CacheConfig(block_size=4, **cache), scheduler=config.scheduler)


@pytest.mark.req("MEM-05", "KV-04")
def test_blocks_come_from_the_number_the_bytes_or_a_tenth_of_memory():
    assert num_kv_blocks(with_cache(num_blocks=17), LAYOUT, ROOMY, 0) == 17
    assert num_kv_blocks(with_cache(memory_bytes=50_999), LAYOUT, ROOMY, 0) == 50
    assert num_kv_blocks(with_cache(), LAYOUT, Memory(400_000, 400_000, 0), 0) == 40
    with pytest.raises(
        ConfigError, match=r"--kv-cache-memory-bytes 16,999 / 1,000 bytes a block = 16 blocks, .* 64 / 4 tokens = 16"
    ):
        num_kv_blocks(with_cache(memory_bytes=16_999), LAYOUT, ROOMY, 0)
    with pytest.raises(ConfigError, match=r"10% of 100,000 bytes .* fits --max-model-len 36, or --kv-cache-memory-bytes 17000"):
        num_kv_blocks(with_cache(), LAYOUT, Memory(100_000, 100_000, 0), 0)


@pytest.mark.parametrize("cache", [{"num_blocks": 9}, {"num_blocks": 1}, {"memory_bytes": 9_000}, {"memory_bytes": 10}])
def test_whoever_follows_the_advice_gets_a_cache(cache):
    with pytest.raises(ConfigError) as refused:
        num_kv_blocks(with_cache(**cache), LAYOUT, ROOMY, 0)
    length = re.search(r"fits --max-model-len (\d+)", str(refused.value))
    assert (length is None) == (cache in ({"num_blocks": 1}, {"memory_bytes": 10}))
    if length is not None:
        config = with_cache(**cache)
        shorter = msgspec.structs.replace(config.model, max_model_len=int(length[1]))
        num_kv_blocks(msgspec.structs.replace(config, model=shorter), LAYOUT, ROOMY, 0)
    [flag, number] = re.search(r"--(num-gpu-blocks-override|kv-cache-memory-bytes) (\d+) is enough", str(refused.value)).groups()
    field = {"num-gpu-blocks-override": "num_blocks", "kv-cache-memory-bytes": "memory_bytes"}[flag]
    assert num_kv_blocks(with_cache(**{**cache, field: int(number)}), LAYOUT, ROOMY, 0) == 17


@pytest.mark.req("KV-04")
def test_with_windows_the_arithmetic_is_that_of_each_group():
    layout = KVLayout((KVGroup((0,), 4, None), KVGroup((1,), 4, 9)), 1000)
    assert num_kv_blocks(with_cache(num_blocks=24), layout, ROOMY, 0) == 24  # 16, 2 + 4 + 1, and the null block
    sentence = r"64 / 4 tokens \+ a window of 9 with 16 in flight / 4 tokens = 23; what there is fits --max-model-len 60"
    with pytest.raises(ConfigError, match=sentence):
        num_kv_blocks(with_cache(num_blocks=23), layout, ROOMY, 0)


@pytest.mark.req("MEM-01", "MEM-03", "MEM-05")
def test_a_share_of_the_memory_is_for_weights_steps_and_cache_together():
    memory = Memory(total=1_000_000, free=600_000, own=350_000)
    assert num_kv_blocks(with_cache(memory_utilization=0.9), LAYOUT, memory, 100_000) == 450
    arithmetic = r"0.9 x 1,000,000 bytes of memory - 350,000 with the weights - 540,000 for a step = 10,000\) / 1,000"
    with pytest.raises(ConfigError, match=arithmetic):
        num_kv_blocks(with_cache(memory_utilization=0.9), LAYOUT, memory, 540_000)
    with pytest.raises(ConfigError, match="450,000 bytes in all, and of 1,000,000 bytes of memory 549,999 are free"):
        num_kv_blocks(with_cache(memory_utilization=0.9), LAYOUT, Memory(1_000_000, 549_999, 350_000), 100_000)


@pytest.mark.req("MEM-01", "MEM-04")
def test_a_devices_parts_add_up_to_the_share_that_was_asked_for():
    memory = Memory(total=1_000_000, free=640_000, own=330_000, at_start=970_000)
    assert num_kv_blocks(with_cache(), LAYOUT, memory, 50_000) == (900_000 - 330_000 - 50_000) // 1000
    with_graphs = msgspec.structs.replace(memory, graphs=20_500)
    assert num_kv_blocks(with_cache(), LAYOUT, with_graphs, 50_000) == 499, "21 blocks fewer, for graphs of 20.5"
    assert num_kv_blocks(with_cache(memory_utilization=0.8), LAYOUT, with_graphs, 50_000) == 399
    arithmetic = (
        r"--gpu-memory-utilization 0.9 x 1,000,000 bytes of memory - 330,000 with the weights - 540,000 for a step"
        r" - 20,500 for CUDA graphs = 9,500\) / 1,000 bytes a block = 9 blocks"
    )
    with pytest.raises(ConfigError, match=arithmetic):
        num_kv_blocks(with_cache(), LAYOUT, with_graphs, 540_000)
    # Somebody else has taken memory since.
    crowded = msgspec.structs.replace(with_graphs, free=540_000)
    with pytest.raises(ConfigError, match=r"540,000 are free, .*, and a step takes 50,000 and CUDA graphs 20,500"):
        num_kv_blocks(with_cache(), LAYOUT, crowded, 50_000)


@pytest.mark.req("MEM-03")
def test_what_others_hold_of_a_device_is_refused_before_anything_is_loaded():
    check_at_start(CacheConfig(), 1_000_000, 900_000)
    message = (
        r"--gpu-memory-utilization 0.9 x 1,000,000 bytes of memory = 900,000, but only 657,999 are free before "
        r"anything is loaded: others use 342,001; at most --gpu-memory-utilization 0.65 can be had"
    )
    with pytest.raises(ConfigError, match=message):
        check_at_start(CacheConfig(), 1_000_000, 657_999)
    check_at_start(CacheConfig(memory_utilization=0.65), 1_000_000, 657_999)
    for decided in (CacheConfig(num_blocks=20), CacheConfig(memory_bytes=1000)):
        check_at_start(decided, 1_000_000, 100)


def test_a_cache_that_does_not_fit_beside_what_others_use_is_refused_with_the_numbers():
    for cache in ({"num_blocks": 50}, {"memory_bytes": 50_000}, {}):
        assert num_kv_blocks(with_cache(**cache), LAYOUT, Memory(500_000, 52_000, 0), 2_000) == 50
        with pytest.raises(
            ConfigError, match=r"50,000 bytes in all, and of 500,000 bytes of memory 51,999 are free, .* a step takes 2,000"
        ):
            num_kv_blocks(with_cache(**cache), LAYOUT, Memory(500_000, 51_999, 0), 2_000)


def test_memory_is_the_containers_where_that_is_less_and_the_page_cache_is_free(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 800 kB\nHugePages_Total: 0\n")
    machine = measure_memory(tmp_path, tmp_path / "meminfo")
    assert machine.free == 800 * 1024 and machine.total > 2**20 and machine.own > 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert measure_memory(tmp_path, tmp_path / "meminfo").free == machine.free
    for name, text in {
        "max": "1000000\n",
        "current": "700000\n",
        "stat": "anon 5\nactive_file 20000\ninactive_file 80000\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    contained = measure_memory(tmp_path, tmp_path / "meminfo")
    assert (contained.total, contained.free) == (1_000_000, 400_000)


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 15))
def test_the_replay_buffer_gives_everything_from_a_number_on_or_nothing(size, written, start):
    buffer = ReplayBuffer(size)
    for seq in range(written):
        assert buffer.append(b"%d" % seq) == seq
    expected = [(seq, b"%d" % seq) for seq in range(start, written)]
    complete = max(written - size, 0) <= start <= written
    assert buffer.since(start) == (expected if complete else None)


@pytest.mark.req("AS-01", "AS-03", "AS-17", "IPC-06")
@pytest.mark.parametrize(("executor", "depth", "overlaps"), [(InlineExecutor, 1, False), (ThreadExecutor, 2, True)])
def test_a_step_is_planned_while_another_runs_at_depth_two_alone(executor, depth, overlaps):
    config = make_config(depth=depth)
    runner = FakeRunner(config)
    runner.initialize_kv_cache(64)
    submitted, waited = threading.Semaphore(0), []
    execute, running = runner.execute, executor(runner)

    def watched(plan):
        # The second plan is there before the first has run, or it never is.
        if plan.step_id == 1:
            waited.append(submitted.acquire(timeout=60 if overlaps else 0.0))
        execute(plan)

    runner.execute = watched
    core = EngineCore(config, running, 64, epoch=0)
    submit = running.submit

    def counted(plan, masked):
        if plan.step_id == 2:
            submitted.release()
        submit(plan, masked)

    running.submit = counted
    core.handle(make_request(0, [1, 2, 3], 6))
    frames = []
    while core.has_work:
        frames.append(core.step())
    running.close()
    assert waited == [overlaps]
    tokens = [token for frame in frames if frame for token in memoryview(frame.token_ids).cast("i")]
    assert tokens == reference([1, 2, 3], 6)


def test_steps_that_overlap_are_not_counted_twice():
    config = make_config(depth=2)
    runner = FakeRunner(config)
    runner.initialize_kv_cache(64)
    executor = ThreadExecutor(runner)
    core = EngineCore(config, executor, 64, epoch=0)
    observe, durations = core._meter.observe, []

    def watched(now, *, seconds, **counts):
        durations.append(seconds)
        observe(now, seconds=seconds, **counts)

    core._meter.observe = watched
    core.handle(make_request(0, [SLOW_TOKEN], 12))
    start = time.perf_counter()
    while core.has_work:
        core.step()
    elapsed = time.perf_counter() - start
    executor.close()
    assert len(durations) == core.num_steps
    # Each step counts from the end of the one before it: together they cannot take longer than the clock says.
    assert 0.02 * (len(durations) - 1) <= sum(durations) <= elapsed


def test_the_core_reports_what_the_scheduler_has():
    config = make_config(max_num_seqs=2)
    runner = FakeRunner(config)
    runner.initialize_kv_cache(64)
    core = EngineCore(config, InlineExecutor(runner), 64, epoch=7)
    for index in range(3):
        core.handle(make_request(index, [index] * 9, 4))
    assert core.stats().report.prefill_backlog_tokens == 27
    core.step()
    stats = core.stats()
    report = stats.report
    assert (report.epoch, report.seq, report.num_requests_running, report.num_requests_waiting) == (7, 1, 2, {"capacity": 1})
    assert (report.kv_blocks_total, report.kv_blocks_reclaimable) == (63, 58)
    assert report.kv_cache_usage_perc == pytest.approx(5 / 63) and report.max_num_seqs == 2
    assert stats.steps == 1 and stats.prefix_queries == 18
    core.handle(Control(5, ResetPrefixCache()))
    core.step()
    assert core.scheduler.kv.pool.cached_hashes(), "a reset while requests hold blocks is refused"
    (refusal,) = core.take_replies()
    assert refusal.call_id == 5 and "2 requests hold blocks" in str(refusal.error)
    while core.has_work:
        core.step()
    core.handle(Control(6, ResetPrefixCache()))
    core.step()
    assert core.take_replies() == [ControlDone(6)] and core.take_replies() == []
    assert not core.scheduler.kv.pool.cached_hashes()


def test_a_step_submits_sends_what_sampling_needs_and_waits_and_an_idle_one_does_nothing():
    calls = []

    class Recorder(InlineExecutor):
        def submit(self, plan, masked):
            calls.append("submit")
            super().submit(plan, masked)

        def sample(self, inputs):
            calls.append("sample")
            super().sample(inputs)

        def collect(self):
            calls.append("collect")
            return super().collect()

    config = make_config()
    runner = FakeRunner(config)
    runner.initialize_kv_cache(64)
    core = EngineCore(config, Recorder(runner), 64, epoch=0)
    assert core.step() is None and not calls
    core.handle(make_request(0, [1], 2))
    while core.has_work:
        core.step()
    assert calls == ["submit", "sample", "collect"] * 2


def test_nothing_to_do_is_nothing_to_tell():
    machine = Machine(make_config())
    assert machine.scheduler.schedule(0.0) is None and machine.scheduler.take_outputs().is_empty


@pytest.mark.parametrize("executor", [InlineExecutor, ThreadExecutor])
def test_a_step_s_time_holds_the_forward_pass_whoever_runs_it(executor):
    config = make_config()
    runner = FakeRunner(config)
    runner.initialize_kv_cache(64)
    execute = runner.execute

    def slow(plan):
        time.sleep(0.02)
        execute(plan)

    runner.execute = slow
    running = executor(runner)
    core = EngineCore(config, running, 64, epoch=0)
    core.handle(make_request(0, [1, 2, 3], 4))
    while core.has_work:
        core.step()
    running.close()
    report = core.stats().report
    assert report.decode_step_s >= 0.02
    assert 0 < report.prefill_tokens_per_s <= 3 / 0.02


def test_the_report_counts_blocks_of_sequences_whatever_the_number_of_groups():
    groups = (KVGroup((0,), 4, None), KVGroup((1,), 4, 8))
    config = make_config()
    runner = FakeRunner(config, groups)
    runner.initialize_kv_cache(65)
    core = EngineCore(config, InlineExecutor(runner), 65, epoch=0, groups=groups)
    core.handle(make_request(1, [1] * 9, 4))
    assert (core.stats().report.kv_blocks_total, core.stats().report.kv_blocks_reclaimable) == (32, 32)
    core.step()
    report = core.stats().report
    assert report.kv_blocks_reclaimable == 29 and report.kv_cache_usage_perc == 6 / 64
