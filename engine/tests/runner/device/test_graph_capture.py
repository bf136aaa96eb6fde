"""When graphs are captured, of what, and that a replay is the step. The program is a toy: two layers whose attention adds up
what rows have seen so far."""

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from recording_graphs import CaptureError, RecordingGraphs

from penstock.engine.models.layers.attention import Attention
from penstock.engine.runner.device.graphs import dispatcher as dispatcher_module
from penstock.engine.runner.device.graphs.capture import WARM_UPS, GraphManager
from penstock.engine.runner.device.graphs.cuda import CudaGraphs
from penstock.engine.runner.device.graphs.descriptor import BatchDescriptor, GraphMode
from penstock.engine.runner.device.graphs.dispatcher import Batch, GraphDispatcher
from penstock.engine.runner.device.runtime import DeviceMemory
from penstock.kernels.prepare_kv.reference import Rotary

HIDDEN, SPARE = 4, 16
SIZES = (1, 2, 4, 8)


class FakeDevice:
    """Memory that each capture takes a bit of."""

    def __init__(self, graphs: RecordingGraphs, bytes_per_graph: int = 100) -> None:
        self.graphs, self.bytes_per_graph, self.synchronizations = graphs, bytes_per_graph, 0

    def main_stream(self):
        return torch.inference_mode()

    def synchronize(self) -> None:
        assert not self.graphs.capturing, "a capture does not permit it"
        self.synchronizations += 1

    def return_free_memory(self) -> None:
        pass

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1 << 30, (1 << 30) - self.bytes_per_graph * self.graphs.captures, 0, 0, 0)


class ToyProgram:
    """Rows with a sum each, of what their tokens have been; `rows` says whose each token of the step is."""

    def __init__(self, graphs: RecordingGraphs, layers: int = 2) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(HIDDEN, HIDDEN, generator=generator) / 4 for _ in range(layers + 1)]
        self.layers = [Attention(index, 2, 1, HIDDEN // 2, 1.0, 0.0, None) for index in range(layers)]
        self.sums = torch.zeros(layers, SPARE + 1, HIDDEN)
        self.rows, self.ids = torch.full((SPARE,), SPARE), torch.zeros(SPARE, dtype=torch.long)
        self.table = torch.randn(10, HIDDEN, generator=generator)
        self.logits = torch.zeros(SPARE, HIDDEN)
        self._attention = graphs.kernel(self._attend, "attention")
        self.size, self.runs, self.broken = 0, 0, False

    def arguments(self) -> dict[str, torch.Tensor]:
        return {"rows": self.rows, "ids": self.ids}

    def pad(self, key: BatchDescriptor) -> None:
        self.set([], key.num_tokens)

    def set(self, tokens: list[tuple[int, int]], size: int) -> None:
        """(row, id) of each token, then padding."""
        self.size = size
        self.rows.fill_(SPARE)
        for index, (row, token) in enumerate(tokens):
            self.rows[index], self.ids[index] = row, token

    def step(self, key: BatchDescriptor) -> torch.Tensor:
        out = self.forward(key, self.attend)
        self.logits[: key.num_tokens].copy_(out)
        return out

    def forward(self, key: BatchDescriptor, attend) -> torch.Tensor:
        self.runs += 1
        if self.broken:
            raise RuntimeError("no such kernel")
        hidden, n = self.table[self.ids[: key.num_tokens]], key.num_tokens
        angles = Rotary(hidden[:, :1] * 1, hidden[:, 1:2] * 1)
        for layer, weight in zip(self.layers, self.weights, strict=False):
            q, k, v = hidden @ weight, hidden[:, :2] * 2, hidden[:, 2:] * 3
            hidden = hidden + attend(layer, q, k, v, angles) @ weight
        assert hidden.shape[0] == n
        return torch.tanh(hidden @ self.weights[-1])

    def attend(self, layer: Attention, q, k, v, rotary: Rotary, out: torch.Tensor | None = None) -> torch.Tensor:
        found = self._attention(layer, q, k, v, rotary, self.rows[: q.shape[0]], self.sums)
        return found if out is None else out.copy_(found)

    def _attend(self, layer: Attention, q, k, v, rotary: Rotary, rows, sums) -> torch.Tensor:
        own = rows[:, None] != SPARE
        sums[layer.index].index_add_(0, rows, torch.where(own, torch.cat([k, v], 1) * rotary.cos, 0.0))
        return torch.where(own, q + sums[layer.index][rows] * rotary.sin, 0.0)


def make(mode="FULL_AND_PIECEWISE", sizes=SIZES, bytes_per_graph=100, layers=2, **kwargs):
    graphs = RecordingGraphs()
    program, dispatcher = ToyProgram(graphs, layers), GraphDispatcher(mode, sizes, 8)
    device = FakeDevice(graphs, bytes_per_graph)
    manager = GraphManager(device, graphs, program, dispatcher, **kwargs)
    return SimpleNamespace(graphs=graphs, program=program, dispatcher=dispatcher, manager=manager, device=device)


def all_captured(*args, **kwargs):
    toy = make(*args, **kwargs)
    while toy.manager.capture_next():
        pass
    return toy


def eager(program: ToyProgram, tokens: list[tuple[int, int]]) -> torch.Tensor:
    program.set(tokens, len(tokens))
    return program.forward(BatchDescriptor(len(tokens), None), program.attend)


@torch.inference_mode()
def replayed(toy, tokens: list[tuple[int, int]], mode: GraphMode) -> torch.Tensor:
    batch = Batch(len(tokens), len(tokens), 1 if mode is GraphMode.FULL else None)
    found = toy.dispatcher.dispatch(batch)
    assert found.mode is mode
    toy.program.set(tokens, found.descriptor.num_tokens)
    if mode is GraphMode.FULL:
        toy.manager.replay_full(found.descriptor)
        return toy.program.logits[: len(tokens)].clone()
    return toy.manager.replay_forward(found.descriptor)[: len(tokens)].clone()


def counts(toy) -> tuple[int, int, int]:
    report = toy.manager.report()
    return report.captured, report.pending, report.failed


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
@torch.inference_mode()
def test_replays_of_every_size_are_the_eager_steps_after_the_state_has_changed(mode: GraphMode) -> None:
    toy, reference = all_captured(), make().program
    generator = torch.Generator().manual_seed(2)
    for round_ in range(30):
        count = round_ % 8 + 1
        rows = torch.randperm(SPARE, generator=generator)[:count].tolist()
        tokens = [(row, int(torch.randint(10, (1,), generator=generator))) for row in rows]
        # As many columns: torch's products differ in their last bits by size.
        torch.testing.assert_close(replayed(toy, tokens, mode), eager(reference, tokens), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(toy.program.sums, reference.sums, rtol=1e-5, atol=1e-5)
    assert not toy.program.sums[:, SPARE].any(), "padding leaves nothing behind"


@pytest.mark.req("CG-13")
def test_a_forward_pass_is_cut_at_each_attention_which_stays_alone() -> None:
    toy = all_captured("PIECEWISE", sizes=[4], layers=3)
    [piecewise] = toy.manager._pieces.values()
    assert len(piecewise._graphs) == 4, "one more than attentions"
    names = [{call.name for call in graph.calls} for graph in piecewise._graphs]
    assert not any("attention" in found for found in names), "attention is in no graph"
    assert all(found & {"aten::mm", "aten::matmul"} for found in names), "what is dense is"
    toy.graphs.kernels.clear()
    before = toy.graphs.replays
    replayed(toy, [(1, 2), (3, 4)], GraphMode.PIECEWISE)
    assert toy.graphs.kernels == ["attention"] * 3 and toy.graphs.replays - before == 4


def test_a_uniform_step_is_one_launch() -> None:
    toy = all_captured()
    toy.graphs.kernels.clear()
    before = toy.graphs.replays
    replayed(toy, [(1, 2), (3, 4), (5, 6)], GraphMode.FULL)
    assert toy.graphs.kernels == [] and toy.graphs.replays - before == 1


def test_each_graph_is_captured_once_after_warm_ups() -> None:
    toy = all_captured()
    runs = toy.program.runs
    assert runs == 2 * len(SIZES) * (WARM_UPS + 1)
    for mode in (GraphMode.FULL, GraphMode.PIECEWISE):
        for count in range(1, 9):
            replayed(toy, [(row, 1) for row in range(count)], mode)
    assert toy.program.runs == runs, "a replay runs no Python of the model"
    assert not toy.manager.capture_next()
    assert counts(toy) == (2 * len(SIZES), 0, 0)


def test_the_first_sizes_are_captured_before_requests_come_the_others_later() -> None:
    toy = make(sizes=(1, 2, 3, 4, 5, 6, 7, 8))
    toy.manager.capture_first()
    sizes = sorted(key.num_tokens for key in toy.dispatcher.full_keys)
    assert sizes == [1, 2, 4, 8] == sorted(key.num_tokens for key in toy.dispatcher.piecewise_keys)
    assert toy.manager.report().pending == 8
    for count in range(1, 9):
        assert toy.dispatcher.dispatch(Batch(count, count, 1)).mode is GraphMode.FULL
    order = [key.num_tokens for key in toy.manager._full]
    assert order == sorted(order, reverse=True), "the largest first: the others use its memory"


@pytest.mark.req("CG-33")
def test_without_graphs_nothing_is_captured() -> None:
    toy = make("NONE")
    toy.manager.capture_first()
    assert not toy.manager.capture_next() and toy.graphs.captures == 0
    assert toy.dispatcher.dispatch(Batch(1, 1, 1)).mode is GraphMode.NONE


def test_all_graphs_share_one_pool_and_own_nothing_in_it() -> None:
    toy = all_captured()
    pools = {id(graph._graph._pool) for graph in toy.manager._full.values()}
    pools |= {id(piece._pool) for pieces in toy.manager._pieces.values() for piece in pieces._graphs}
    assert len(pools) == 1
    [pool] = {graph._graph._pool for graph in toy.manager._full.values()}
    gc.collect()
    assert len(pool.free()) == len(pool.storages), "the next capture may have all of its memory"


def test_beyond_the_bound_of_memory_no_graph_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    toy = make()
    toy.manager.max_bytes = 250
    toy.manager.capture_first()
    report = toy.manager.report()
    assert report.num_bytes >= 250 and report.pending == 0 and 0 < report.captured < 2 * len(SIZES)
    assert "stay without one" in caplog.text
    assert toy.dispatcher.dispatch(Batch(8, 8, 1)).mode is GraphMode.FULL, "the largest came first"


def test_a_capture_that_fails_leaves_steps_without_a_graph_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    toy = make()
    toy.program.broken = True
    toy.manager.capture_next()
    toy.program.broken = False
    assert "could not be captured" in caplog.text and "no such kernel" in caplog.text
    assert toy.manager.report().failed == 1
    while toy.manager.capture_next():
        pass
    assert counts(toy) == (2 * len(SIZES) - 1, 0, 1), "the others are captured"


def test_a_model_that_waits_for_the_device_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    toy = make()
    forward = toy.program.forward

    def waits(key, attend):
        hidden = forward(key, attend)
        return hidden * float(hidden.max())

    toy.program.forward = waits
    toy.manager.capture_next()
    assert toy.manager.report().failed == 1 and "waits for the device" in caplog.text
    assert gc.isenabled()


def test_no_garbage_is_collected_within_a_capture() -> None:
    toy, seen = make(), set()
    forward = toy.program.forward

    def watched(key, attend):
        seen.add((toy.graphs.capturing, gc.isenabled()))
        return forward(key, attend)

    toy.program.forward = watched
    toy.manager.capture_first()
    assert seen == {(False, True), (True, False)} and gc.isenabled()


@pytest.mark.req("CG-04")
@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_with_debug_logging_a_replay_names_the_addresses(mode: GraphMode, caplog: pytest.LogCaptureFixture) -> None:
    toy = all_captured()
    caplog.set_level(logging.DEBUG, "penstock.engine.runner.device.graphs.replay")
    replayed(toy, [(1, 1)], mode)
    old, toy.program.ids = toy.program.ids, toy.program.ids.clone()
    with pytest.raises(RuntimeError, match="reads ids where") as error:
        replayed(toy, [(1, 1)], mode)
    for tensor in (old, toy.program.ids):
        assert f"ids=0x{tensor.data_ptr():x}" in str(error.value), "expected and found"


def test_an_input_that_has_moved_is_found() -> None:
    toy = all_captured()
    replayed(toy, [(1, 1)], GraphMode.FULL)
    toy.program.ids = toy.program.ids.clone()
    with pytest.raises(CaptureError, match="has been freed"):
        replayed(toy, [(1, 1)], GraphMode.FULL)


def test_cleared_graphs_are_captured_anew() -> None:
    toy = all_captured()
    toy.manager.clear()
    assert toy.dispatcher.dispatch(Batch(1, 1, 1)).mode is GraphMode.NONE
    toy.program.ids = toy.program.ids.clone()
    toy.manager.capture_first()
    replayed(toy, [(1, 1)], GraphMode.FULL)


def test_with_adapters_each_graph_is_there_with_and_without_them_the_one_that_serves_all_first() -> None:
    toy = make(lora=True)
    toy.manager.capture_first()
    first = toy.dispatcher.full_keys | toy.dispatcher.piecewise_keys
    assert first and all(key.has_lora for key in first)
    assert toy.dispatcher.dispatch(Batch(1, 1, 1)).descriptor.has_lora, "until its own is there"
    while toy.manager.capture_next():
        pass
    for keys in (toy.dispatcher.full_keys, toy.dispatcher.piecewise_keys):
        assert sorted(key.has_lora for key in keys) == [False] * len(SIZES) + [True] * len(SIZES)
    assert not toy.dispatcher.dispatch(Batch(1, 1, 1)).descriptor.has_lora


def test_each_variant_has_its_graphs_the_first_of_them_at_once() -> None:
    toy = make(variants=("any", "greedy"))
    toy.manager.capture_first()
    assert {key.variant for key in toy.dispatcher.full_keys} == {"any"}
    while toy.manager.capture_next():
        pass
    assert sorted(key.variant for key in toy.dispatcher.full_keys) == ["any"] * 4 + ["greedy"] * 4
    assert len(toy.dispatcher.piecewise_keys) == len(SIZES), "one kind of pieces serves both"


def test_graphs_for_few_requests_are_captured_last_and_of_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "FEW_REQUESTS", (8, 64))
    toy, dispatcher = make(), GraphDispatcher("FULL", (4, 16), 12)
    manager = GraphManager(toy.device, toy.graphs, toy.program, dispatcher, variants=("any", "greedy"), few="any")
    manager.capture_first()
    assert {key.num_reqs for key in dispatcher.full_keys if not key.uniform} == {4, 12}
    assert {key.variant for key in dispatcher.full_keys} == {"any"}
    while manager.capture_next():
        pass
    assert [key.variant for key in dispatcher.full_keys if key.num_reqs == 8] == ["any"]


def test_each_capture_is_on_the_main_stream_and_over_before_the_next() -> None:
    toy, seen = make(), []
    step, forward, end, synchronize = toy.program.step, toy.program.forward, toy.graphs.end, toy.device.synchronize

    def watched(run):
        def call(*args):
            if toy.graphs.capturing:
                seen.append("capture" if torch.is_inference_mode_enabled() else "capture outside of the stream's context")
            return run(*args)

        return call

    toy.program.step, toy.program.forward = watched(step), watched(forward)
    toy.graphs.end = lambda: (end(), seen.append("end"))[0]
    toy.device.synchronize = lambda: (synchronize(), seen.append("wait"))[0]
    while toy.manager.capture_next():
        pass
    assert toy.manager.report().captured == 8 and "capture outside of the stream's context" not in seen
    for at, event in enumerate(seen):
        if event == "capture" and "end" in seen[:at]:
            last_end = max(index for index in range(at) if seen[index] == "end")
            assert "wait" in seen[last_end:at]
    assert seen[-1] == "wait"


class StandInGraph:
    """In place of `torch.cuda.CUDAGraph`: captures nothing, and knows which graphs have ended."""

    begun: list["weakref.ref[StandInGraph]"]
    capturing: bool

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        type(self).begun.append(weakref.ref(self))
        type(self).capturing = True

    def capture_end(self) -> None:
        type(self).capturing = False

    @classmethod
    def living(cls) -> int:
        return sum(graph() is not None for graph in cls.begun)


@pytest.mark.req("CG-23")
@pytest.mark.parametrize(("mode", "failures"), [("FULL", 2), ("PIECEWISE", 1)])  # uniform and mixed; mixed alone
def test_a_failed_capture_ends_no_cuda_graph_before_all_are_cleared(
    mode: str, failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.engine.runner.device.graphs.capture")  # a kept traceback would keep graphs
    StandInGraph.begun, StandInGraph.capturing = [], False
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    toy = make()
    manager = GraphManager(toy.device, CudaGraphs(), toy.program, GraphDispatcher(mode, SIZES, 8))
    whole = toy.program.forward

    def breaks_at_its_end(key: BatchDescriptor, attend) -> torch.Tensor:
        hidden = whole(key, attend)
        if StandInGraph.capturing and key.num_tokens == SIZES[1]:
            raise RuntimeError("no such kernel")
        return hidden

    monkeypatch.setattr(toy.program, "forward", breaks_at_its_end)
    while manager.capture_next():
        gc.collect()
    assert manager.report().failed == failures
    assert StandInGraph.living() == len(StandInGraph.begun), "the end of one graph frees a workspace that the others use"
    manager.clear()
    gc.collect()
    assert StandInGraph.living() == 0
