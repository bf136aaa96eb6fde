"""Engines whose steps are graphs, against engines without any: the whole runner over CPU tensors, on graphs that are recorded and
replayed with addresses and numbers frozen."""

import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_runners import FORMS
from lora_adapters import make_adapter
from recording_graphs import CaptureError, RecordingGraphs
from test_core_with_runner import SCHEDULER, requests
from test_device_lora import run as run_adapters
from test_device_runner import VOCAB, Engine

from penstock.engine.config import GraphConfig, LoraConfig, LoraModule, SchedulerConfig
from penstock.engine.messages import AddRequest
from penstock.engine.runner.device.device_runner import DeviceForms
from penstock.engine.runner.device.graphs import dispatcher as reasons
from penstock.engine.sampling import SamplingParams
from penstock.kernels.ops import triton_ops
from penstock.kernels.step_state.ops import triton_step_ops

pytestmark = pytest.mark.slow

SIZES = (1, 2, 4, 8, 16, 48)


class Graphed:
    """An engine on graphs."""

    def __init__(self, build, path, mode="FULL_AND_PIECEWISE", sizes=SIZES, num_blocks=100, depth=2, everything=True, **kwargs):
        self.recording = RecordingGraphs()
        config = GraphConfig(mode=mode, capture_sizes=sizes)
        kwargs.setdefault("scheduler", SCHEDULER)
        self.runner = build(path, depth=depth, recording=self.recording, graphs=config, **kwargs)
        self.engine = Engine(self.runner, depth, num_blocks)
        while everything and self.runner.graphs.capture_next():
            pass
        self.captures = self.recording.captures

    def run(self, batch: list[AddRequest]) -> dict[int, list[int]]:
        tokens = self.engine.run(batch)
        assert self.recording.captures == self.captures, "nothing is captured on a request's path"
        return tokens

    def modes(self) -> Counter:
        return Counter({(found.mode, found.reason): found.steps for found in self.engine.core.stats().step.graphs})


def decodes(count: int, lengths: range | None = None, prompt: int = 5, **fields) -> list[AddRequest]:
    rng = np.random.default_rng(7)
    lengths = lengths or range(12, 13)
    return [
        AddRequest(
            index,
            f"r{index}",
            rng.integers(0, VOCAB, prompt).tolist(),
            SamplingParams(max_tokens=lengths[index % len(lengths)], temperature=0.0, **fields),
            float(index),
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama")


@pytest.fixture(scope="module")
def expected(path, build_device_runner):
    return Engine(build_device_runner(path, scheduler=SCHEDULER), 2, 100).run(requests(adjusted=False))


@pytest.mark.req("CG-11", "SMP-24")
@pytest.mark.parametrize("num_blocks", [100, 22], ids=["roomy", "preempted"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_tokens_are_those_of_eager_steps_while_rows_come_and_go(path, build_device_runner, expected, mode, num_blocks) -> None:
    graphed = Graphed(build_device_runner, path, mode, num_blocks=num_blocks)
    assert graphed.run(requests(adjusted=False)) == expected
    stats, modes = graphed.engine.core.stats(), graphed.modes()
    assert stats.prefix_hits > 0 and (stats.preemptions > 0) == (num_blocks == 22)
    wanted = {
        "FULL": {("FULL", reasons.UNIFORM), ("FULL", reasons.MIXED)},
        "PIECEWISE": {("PIECEWISE", reasons.NO_FULL_GRAPH), ("PIECEWISE", reasons.MIXED)},
        "FULL_AND_PIECEWISE": {("FULL", reasons.UNIFORM), ("PIECEWISE", reasons.MIXED)},
    }
    assert set(modes) == wanted[mode], "every step has a graph"


def test_mixed_steps_of_few_requests_have_graphs_of_their_own(path, build_device_runner) -> None:
    scheduler = SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=24, watermark=0.0)
    batch = decodes(5, range(6, 18, 3), prompt=17)
    expected = Engine(build_device_runner(path, scheduler=scheduler), 2, 100).run(batch)
    graphed = Graphed(build_device_runner, path, "FULL", (4, 24), scheduler=scheduler)
    used = []
    replay = graphed.runner.graphs.replay_full
    graphed.runner.graphs.replay_full = lambda key: used.append(key) or replay(key)
    assert graphed.run(batch) == expected
    assert {key.num_reqs for key in used if key.num_tokens == 24} == {16}, "and not 20, as 24 tokens might be"


def test_steps_that_ask_for_more_than_tokens_end_their_graph_at_the_logits(path, build_device_runner) -> None:
    batch = requests(adjusted=True)
    expected = Engine(build_device_runner(path, scheduler=SCHEDULER), 2, 100).run(batch)
    graphed = Graphed(build_device_runner, path, num_blocks=22)
    assert graphed.run(batch) == expected
    assert set(graphed.modes()) == {("FULL", reasons.UNIFORM), ("PIECEWISE", reasons.MIXED)}


@pytest.mark.parametrize("name", ["gemma3", "qwen3-windows"])
def test_groups_of_windows_have_graphs_too(checkpoint, build_device_runner, name) -> None:
    batch = requests(adjusted=False)
    expected = Engine(build_device_runner(checkpoint(name), scheduler=SCHEDULER), 2, 60).run(batch)
    assert Graphed(build_device_runner, checkpoint(name), num_blocks=60).run(batch) == expected


def test_adapters_that_change_slots_need_no_new_graph(path, build_device_runner, tmp_path) -> None:
    lora = LoraConfig(max_loras=1, max_cpu_loras=4, max_lora_rank=16)
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(path)
    modules = []
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, model, seed=seed)
        modules.append(LoraModule(name, str(tmp_path / name)))
    expected = run_adapters(build_device_runner(path, scheduler=SCHEDULER, lora=lora), 2, modules)
    recording, graphs = RecordingGraphs(), GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=SIZES)
    runner = build_device_runner(path, scheduler=SCHEDULER, lora=lora, recording=recording, graphs=graphs)
    assert run_adapters(runner, 2, modules) == expected
    report = runner.graphs.report()
    assert report.failed == 0 and recording.captures > 0 and recording.replays > 20


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "NONE"])
def test_steps_without_adapters_launch_nothing_for_them(path, build_device_runner, tmp_path, mode) -> None:
    lora = LoraConfig(max_loras=1, max_cpu_loras=4, max_lora_rank=16)
    make_adapter(tmp_path / "a", pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(path), seed=0)
    added: list[str] = []

    def counted(*args) -> None:
        added.append(mode)
        FORMS.model.add_lora(*args)

    forms = FORMS._replace(model=replace(FORMS.model, add_lora=counted))
    recording, graphs = RecordingGraphs(), GraphConfig(mode=mode, capture_sizes=SIZES)
    runner = build_device_runner(path, scheduler=SCHEDULER, lora=lora, forms=forms, recording=recording, graphs=graphs)
    engine = Engine(runner, 2, 100)
    while runner.graphs.capture_next():
        pass
    added.clear()
    batch = requests(adjusted=False)[:4]
    assert engine.run(batch) == Engine(build_device_runner(path, scheduler=SCHEDULER), 2, 100).run(batch)
    assert not added and (recording.replays > 20) == (mode != "NONE")
    engine.core.load_adapters([LoraModule("a", str(tmp_path / "a"))])
    (adapter,) = engine.core.adapters()
    engine.run([AddRequest(99, "with", [1, 2, 3], SamplingParams(max_tokens=5), 0.0, lora_id=adapter.lora_id)])
    assert added


def test_every_number_of_decodes_is_the_eager_step(path, build_device_runner) -> None:
    # Each ends a step after the one before it.
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=128)
    batch = decodes(16, range(3, 19))
    eager = Engine(build_device_runner(path, scheduler=scheduler), 2, 200).run(batch)
    graphed = Graphed(build_device_runner, path, sizes=(1, 2, 4, 8, 16), scheduler=scheduler, num_blocks=200)
    assert graphed.run(batch) == eager
    assert graphed.modes()["FULL", reasons.UNIFORM] >= 15
    [full] = [found for found in graphed.engine.core.stats().step.graphs if found.mode == "FULL"]
    assert full.padding > 0


def test_a_steady_decode_step_is_one_copy_one_graph_and_one_copy_back(path, build_device_runner) -> None:
    graphed = Graphed(build_device_runner, path, depth=1)
    engine, runtime, recording = graphed.engine, graphed.runner.runtime, graphed.recording
    for request in decodes(3, range(40, 41), prompt=17):
        engine.core.handle(request)
    while len(engine.tokens) < 3:
        engine.step()
    steady = 0
    addresses = {name: tensor.data_ptr() for name, tensor in graphed.runner._capturable.arguments().items()}
    while engine.core.has_work:
        before = (recording.replays, runtime.uploads, runtime.downloads, runtime.waits, runtime.synchronizations)
        recording.kernels.clear()
        engine.step()
        after = (recording.replays, runtime.uploads, runtime.downloads, runtime.waits, runtime.synchronizations)
        assert tuple(np.subtract(after, before)) == (1, 1, 1, 1, 0)
        assert set(recording.kernels) <= {"apply_changes"}, "a block that was appended, now and then"
        steady += not recording.kernels
        now = {name: tensor.data_ptr() for name, tensor in graphed.runner._capturable.arguments().items()}
        assert now == addresses
    assert steady > 30


@pytest.mark.req("CG-07", "IB-10")
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_padding_changes_no_byte_of_the_cache(path, build_device_runner, mode) -> None:
    # 5 requests in steps of 16, and prompts that end between sizes.
    found = []
    for engine in (
        Engine(build_device_runner(path, scheduler=SCHEDULER), 1, 100),
        Graphed(build_device_runner, path, mode, sizes=(16, 48), depth=1).engine,
    ):
        engine.runner.kv_caches[0].untyped_storage().fill_(0)
        engine.run(decodes(5, prompt=7))
        storage = engine.runner.kv_caches[0].untyped_storage()
        null_block = engine.runner.kv_layout().page_bytes // 4
        found.append(torch.empty(0, dtype=torch.float32).set_(storage)[null_block:].clone())
    assert found[0].any()
    written = [cache != 0 for cache in found]
    assert torch.equal(*written), "padding writes nothing, but for the block that nobody reads"
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.req("CG-18", "CG-32")
def test_a_batch_beyond_the_largest_size_runs_without_a_graph_and_is_counted(path, build_device_runner) -> None:
    batch = decodes(6)
    eager = Engine(build_device_runner(path, scheduler=SCHEDULER), 2, 100).run(batch)
    graphed = Graphed(build_device_runner, path, sizes=(1, 2, 4))
    assert graphed.run(batch) == eager
    modes = graphed.modes()
    assert set(modes) == {("NONE", reasons.TOO_LARGE)} or modes["NONE", reasons.TOO_LARGE] > 5
    [none] = [found for found in graphed.engine.core.stats().step.graphs if found.mode == "NONE"]
    assert none.padding == 0


@pytest.mark.req("OB-34")
def test_a_batch_just_above_a_size_lacks_another_one(path, build_device_runner) -> None:
    """Each symptom as the metrics have it, then the one change of `--cudagraph-capture-sizes` that ends it."""
    batch, scheduler = decodes(5), SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=48)

    def shares(*sizes: int) -> tuple[float, float]:
        """Of the steps those that run without a graph, and of the rows of decode graphs those that are padding."""
        graphed = Graphed(build_device_runner, path, sizes=sizes, scheduler=scheduler)
        graphed.run(batch)
        found = graphed.engine.core.stats().step.graphs
        eager = sum(it.steps for it in found if (it.mode, it.reason) == ("NONE", reasons.TOO_LARGE))
        padded = [it for it in found if it.mode == "FULL"]
        rows = sum(it.tokens + it.padding for it in padded)
        return eager / sum(it.steps for it in found), sum(it.padding for it in padded) / max(rows, 1)

    assert shares(1, 2, 4) == (1.0, 0.0), "all of them are beyond the largest"
    eager, padding = shares(1, 2, 4, 48)
    assert (eager, padding > 0.5) == (0.0, True), "none is, and most of a step is for nobody"
    assert shares(1, 2, 4, 5, 48) == (0.0, 0.0)


@pytest.mark.req("CG-33", "CG-32")
def test_without_graphs_nothing_is_captured_and_every_step_says_so(path, build_device_runner, expected) -> None:
    graphed = Graphed(build_device_runner, path, "NONE", sizes=())
    assert graphed.run(requests(adjusted=False)) == expected
    assert graphed.captures == graphed.recording.replays == 0
    assert set(graphed.modes()) == {("NONE", reasons.DISABLED)}


@pytest.mark.req("CG-30")
def test_the_largest_step_is_measured_without_graphs(path, build_device_runner) -> None:
    graphed = Graphed(build_device_runner, path)
    runner, before = graphed.runner, graphed.recording.replays
    runner.profile_memory()
    assert graphed.recording.replays == before
    assert runner.measure_memory().graphs > 0


def test_what_has_no_graph_yet_is_padded_to_one_that_has(path, build_device_runner, expected) -> None:
    graphed = Graphed(build_device_runner, path, everything=False)
    assert graphed.runner.graphs.report().pending > 0
    assert graphed.run(requests(adjusted=False)) == expected
    assert not any(mode == "NONE" for mode, _ in graphed.modes())


def test_a_tensor_that_a_graph_reads_and_that_has_moved_is_found(path, build_device_runner, caplog) -> None:
    graphed = Graphed(build_device_runner, path, depth=1)
    graphed.run(decodes(2))
    norm = graphed.runner.model.norm
    norm.weight = norm.weight.clone()
    graphed.run(decodes(2))
    assert "has been freed since it was captured" in caplog.text, "a step that failed, and no wrong token"


def test_captures_whose_inputs_cannot_be_made_take_no_step_its_place(path, build_device_runner, monkeypatch) -> None:
    graphed = Graphed(build_device_runner, path, depth=1, everything=False)
    runner, places = graphed.runner, graphed.runner.program.buffers.results.shape[0]

    def fails(*_):
        raise RuntimeError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(runner.program, "prepare", fails)
        for _ in range(places + 1):
            runner.graphs.capture_next()
    assert runner.graphs.report().failed == places + 1
    reference = Graphed(build_device_runner, path, mode="NONE", depth=1)
    assert graphed.run(decodes(2)) == reference.run(decodes(2))


@pytest.mark.req("CG-04")
def test_with_debug_logging_the_step_names_what_has_moved(path, build_device_runner, caplog) -> None:
    graphed = Graphed(build_device_runner, path, depth=1)
    caplog.set_level(logging.DEBUG, "penstock.engine.runner.device.graphs.replay")
    graphed.run(decodes(2))
    inputs = graphed.runner.buffers.inputs
    old = inputs.seq_lens
    object.__setattr__(inputs, "seq_lens", old.clone())
    graphed.run(decodes(2))
    assert "reads seq_lens where it was captured" in caplog.text
    for tensor in (old, graphed.runner.buffers.inputs.seq_lens):
        assert f"seq_lens=0x{tensor.data_ptr():x}" in caplog.text, "expected and found"


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_there_are_new_graphs(path, build_device_runner, expected, level) -> None:
    graphed = Graphed(build_device_runner, path, num_blocks=320)
    runner = graphed.runner
    runner.sleep(level)
    assert runner.graphs.report().captured == 0
    captures = graphed.recording.captures
    runner.wake_up(["weights", "kv_cache"])
    if level == 2:
        assert graphed.recording.captures == captures and not runner.graphs.report().failed, "nothing is captured without weights"
        runner.reload_weights(None)
    graphed.captures = graphed.recording.captures
    assert runner.graphs.report().captured > 0
    assert graphed.run(requests(adjusted=False)) == expected
    assert not any(mode == "NONE" for mode, _ in graphed.modes())


def test_a_model_that_cannot_be_captured_is_served_without_graphs(path, build_device_runner, expected, monkeypatch) -> None:
    def refuse(self, pool):
        raise CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordingGraphs, "begin", refuse)
    graphed = Graphed(build_device_runner, path)
    assert graphed.run(requests(adjusted=False)) == expected
    assert {mode for mode, _ in graphed.modes()} == {"NONE"}
    assert graphed.runner.graphs.report().failed > 0


# What earlier graphs have left is spoilt, and padding computes with it.
@pytest.mark.filterwarnings("ignore:.* encountered in multiply:RuntimeWarning")
def test_triton_kernels_in_a_graph_give_the_tokens_of_torch(path, build_device_runner) -> None:
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
    batch = decodes(2, range(3, 5), prompt=3)
    options = {"sizes": (2, 8), "scheduler": scheduler, "num_blocks": 20, "max_model_len": 64}
    expected = Graphed(build_device_runner, path, **options).run(batch)
    forms = DeviceForms(triton_ops(torch.float32), triton_step_ops(), FORMS.sampling)
    graphed = Graphed(build_device_runner, path, forms=forms, **options, everything=False)
    assert graphed.run(batch) == expected
    assert {mode for mode, _ in graphed.modes()} == {"FULL", "PIECEWISE"}


def test_what_attention_derives_from_a_batch_is_derived_within_each_graph(path, build_device_runner) -> None:
    seen = []

    def attend(q, kv_cache, batch, *others):
        seen.append(batch)
        return FORMS.model.paged_attention(q, kv_cache, batch, *others)

    forms = FORMS._replace(model=replace(FORMS.model, paged_attention=attend))
    graphed = Graphed(build_device_runner, path, "FULL", sizes=(1, 2), forms=forms, everything=False)
    seen.clear()
    graphed.runner.graphs.capture_next()
    layers, runs = graphed.runner.decoder_config.num_layers, 3
    assert len(seen) == runs * layers, "two warm-ups and the capture"
    assert len({id(batch) for batch in seen}) == runs, "the capture finds nothing that a warm-up has left"
