"""The rows on the device are those of the host, whatever plans there are; only that the device has them first."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_runner import FakeRunner
from hypothesis import given, settings
from late_runtime import LateRuntime
from test_scheduler_fuzz import configs, layouts, live, make_machine, requests

from penstock.engine.cache.layout import full_attention
from penstock.engine.config import ConfigError
from penstock.engine.runner.device import staging
from penstock.engine.runner.device.program import StepBuffers, StepShape
from penstock.engine.runner.device.rows import new_rows, stage_rows, targets
from penstock.engine.runner.device.staging import Staging
from penstock.kernels.sampling.buffers import RESULT
from penstock.kernels.step_state.batch import PAD_SLOT
from penstock.kernels.step_state.ops import STEP_REFERENCE
from penstock.kernels.step_state.reference import apply_changes as apply


class MirroredRunner(FakeRunner):
    """Keeps rows on a device too, which learns of a plan what is staged and of tokens what is sampled there."""

    def __init__(self, config, groups) -> None:
        super().__init__(config, groups)
        self._runtime, self.steps, most = LateRuntime(), 0, config.scheduler.max_num_seqs
        self.state = new_rows(self._groups, most, config.model.max_model_len, self._runtime.device)
        self.staging = Staging(self._runtime, STEP_REFERENCE, most, config.depth, targets(self.state), page_size=0)
        tokens = config.scheduler.max_num_batched_tokens + 2
        self._buffers = StepBuffers(tokens, most, most, len(self._groups), self.staging.num_slots, self._runtime.device)
        self._found = torch.zeros_like(self._buffers.results)
        self._pending: deque = deque()
        self._depth = config.depth

    def execute(self, plan) -> None:
        super().execute(plan)
        while len(self._pending) >= self._depth:
            self._retire()
        starts = np.concatenate([[0], np.cumsum(plan.num_new_tokens)]).astype(np.int32)
        stage_rows(self.staging.changes, plan, self.table, self.state)
        self._slot = self.staging.send(plan.rows, starts, plan.samples)
        self._request = self.staging.request(len(plan.rows))
        # Two tokens of padding.
        self._inputs = self._buffers.of(StepShape(int(starts[-1]) + 2, len(plan.rows), int(plan.num_new_tokens.max())))
        STEP_REFERENCE.prepare_inputs(self._request, self.state, self._inputs)
        self._check_inputs(plan)

    def _check_inputs(self, plan) -> None:
        request = np.repeat(np.arange(len(plan.rows)), plan.num_new_tokens)
        ends = np.cumsum(plan.num_new_tokens)
        positions = self._starts[request] + np.arange(len(request)) - (ends - plan.num_new_tokens)[request]
        rows = plan.rows[request]
        assert self._inputs.positions.tolist() == [*positions.tolist(), 0, 0]
        assert self._inputs.input_ids.tolist() == [*self.table.token_ids[rows, positions].tolist(), 0, 0]
        for number, group in enumerate(self._groups):
            blocks = self.table.block_tables[number][rows, positions // group.block_size]
            slots = blocks * group.block_size + positions % group.block_size
            assert self._inputs.slot_mapping[number].tolist() == [*slots.tolist(), PAD_SLOT, PAD_SLOT]
        assert self._inputs.seq_lens.tolist() == (self._starts + plan.num_new_tokens).tolist()
        assert self._inputs.logits_indices.tolist() == (ends - 1).tolist()

    def sample(self, inputs):
        result = super().sample(inputs)
        sampled = np.zeros((len(result.token_ids), RESULT), np.int32)
        sampled[:, 0] = result.token_ids[:, 0]
        STEP_REFERENCE.commit_step(torch.from_numpy(sampled), self._request, self._inputs, self.state, self._buffers.results)
        found = self._found[self._slot, : len(sampled)]
        transfer = self._runtime.download([(self._buffers.results[self._slot, : len(sampled)], found)])
        self._pending.append((self._slot, transfer, found, sampled))
        self._check_state()
        self.steps += 1
        return result

    def _check_state(self) -> None:
        table = self.table
        for row in np.flatnonzero(table.num_tokens).tolist():
            known = min(int(table.num_tokens[row]), table.token_ids.shape[1])
            assert np.array_equal(self.state.token_ids[row, :known], table.token_ids[row, :known])
            assert int(self.state.num_computed[row]) == table.num_computed[row]
            for number, (blocks, count) in enumerate(zip(table.block_tables, table.num_blocks, strict=True)):
                assert np.array_equal(self.state.block_tables[number, row, : count[row]], blocks[row, : count[row]])

    def _retire(self) -> None:
        """The oldest step's result is its own, though later steps have run."""
        slot, transfer, found, sampled = self._pending.popleft()
        transfer.wait()
        self.staging.over(slot)
        assert np.array_equal(found, sampled)


@pytest.mark.slow
@pytest.mark.req("IB-01", "IB-04", "IB-08", "IB-11", "MR-04", "MR-05", "AS-06", "AS-08", "AS-15")
@settings(max_examples=30)
@given(configs, layouts, requests)
def test_rows_on_the_device_are_those_of_the_host(config, layout, wanted):
    with pytest.MonkeyPatch.context() as patch:
        # So that many a step takes several pages, and many an admission several runs.
        patch.setattr(staging, "RUN", 7)
        # A device runner verifies no drafts, keeps no pages in the host's memory, and reads no images yet: each step has rows.
        machine = make_machine(config | {"drafts": 0, "host_pages": 0}, layout)
        machine.runner = MirroredRunner(machine.config, machine.groups)
        machine.runner.initialize_kv_cache(machine.config.cache.num_blocks)
        live(machine, [one | {"images": []} for one in wanted])
        assert machine.runner.steps or not machine.plans


def test_a_page_is_not_written_while_it_is_on_its_way():
    """The device of these tests would notice; and that more steps are in flight than was agreed is an error."""
    runtime, target = LateRuntime(), torch.zeros(4, dtype=torch.int32)
    stage = Staging(runtime, STEP_REFERENCE, 2, 1, [target])
    ints, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    for number in range(2):
        stage.changes.write(target, number, np.array([5 + number], np.int32))
        assert stage.send(none, ints, none) == number
    assert target.tolist() == [5, 6, 0, 0]
    with pytest.raises(RuntimeError, match="more than 1 steps are in flight"):
        stage.send(none, ints, none)
    stage.over(0)  # which is not true: nobody has waited
    stage.changes.write(target, 2, np.array([7], np.int32))
    stage.send(none, ints, none)
    with pytest.raises(AssertionError, match="pinned memory was written while it was copied"):
        runtime.download([]).wait()


def test_changes_beyond_a_page_go_ahead_in_pages_of_their_own(monkeypatch):
    monkeypatch.setattr(staging, "RUN", 4)
    runtime, target, other = LateRuntime(), torch.zeros(40, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    stage = Staging(runtime, STEP_REFERENCE, 1, 1, [target, other], page_size=0)
    ints, none, sent = np.zeros(1, np.int32), np.zeros(0, np.int32), []
    monkeypatch.setattr(stage, "_ops", replace(STEP_REFERENCE, apply_changes=lambda *step: sent.append(step[2]) or apply(*step)))
    stage.changes.write(target, 3, np.arange(1, 12, dtype=np.int32))
    stage.changes.scatter(other, np.array([8, 2], np.int32), np.array([80, 20], np.int32))
    stage.changes.write(target, 30, np.array([7], np.int64))
    stage.send(none, ints, none)
    assert target.tolist() == [0, 0, 0, *range(1, 12), *[0] * 16, 7, *[0] * 9]
    assert other.tolist() == [0, 0, 20, 0, 0, 0, 0, 0, 80]
    assert sum(sent) == 6 and len(sent) > 1, "runs of 4, 4 and 3 numbers, two of one and one of two"
    stage.over(0)
    stage.send(none, ints, none)
    assert sum(sent) == 6, "and are forgotten then"


def test_a_table_too_large_for_its_places_is_refused():
    with pytest.raises(ConfigError, match="--max-num-seqs 65536 x --max-model-len 131072"):
        new_rows(full_attention(16), 65_536, 131_072, torch.device("meta"))
