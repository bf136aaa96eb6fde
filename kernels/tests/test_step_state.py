"""Changes, inputs and results of a step: torch's and Triton's form against loops over numbers."""

import numpy as np
import pytest
import torch

from penstock.kernels.step_state import reference, triton
from penstock.kernels.step_state.batch import NO_SLOT, PAD_SLOT, RowState, StepInputs, StepRequest, Targets

BLOCKS = 999


@pytest.fixture(params=[reference, triton], ids=["torch", "triton"])
def form(request):
    """A form's functions."""
    return request.param


class Case:
    """A random state of rows and a step of some of them.

    Args:
        seed: Of everything.
        shape: Rows, length of a row, requests, most tokens of one, requests of padding with a token each, tokens of padding.
        device: Where the tensors are.
    """

    def __init__(self, seed: int, shape: tuple[int, int, int, int, int, int], device: str) -> None:
        rng = self.rng = np.random.default_rng(seed)
        rows, length, count, longest, padding, tail = shape
        self.sizes, self.device, self.spare = [8, 16], device, rows
        blocks = -(-length // min(self.sizes))
        self.token_ids = rng.integers(0, 9999, (rows + 1, length)).astype(np.int32)
        self.computed = rng.integers(0, length - longest, rows + 1).astype(np.int32)
        self.tables = rng.integers(1, BLOCKS, (2, rows + 1, blocks)).astype(np.int32)
        self.rows = np.concatenate([rng.permutation(rows)[:count], np.full(padding, rows)]).astype(np.int32)
        self.counts = np.concatenate([rng.integers(1, longest + 1, count), np.ones(padding)]).astype(np.int32)
        self.samples = np.concatenate([rng.integers(0, 2, count), np.zeros(padding)]).astype(np.int32)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)
        self.num_tokens = int(self.starts[-1]) + tail
        self.adapters = rng.integers(-1, 4, rows + 1).astype(np.int32)
        arrays = (self.token_ids, self.computed, self.tables, self.sizes, self.adapters)
        self.state = RowState(*map(self.tensor, arrays))
        self.step = StepRequest(*(self.tensor(x) for x in (self.rows, self.starts, self.samples, [2], [0])))
        n, r = self.num_tokens, len(self.rows)
        self.inputs = StepInputs(
            input_ids=torch.full((n,), 77, dtype=torch.int32, device=device),
            positions=torch.full((n,), 77, device=device),
            slot_mapping=torch.full((2, n + 5), 77, device=device)[:, :n],
            token_slots=torch.full((n,), 77, dtype=torch.int32, device=device),
            seq_lens=torch.full((r,), 77, dtype=torch.int32, device=device),
            logits_indices=torch.full((r,), 77, device=device),
        )

    def tensor(self, values) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.int32)).to(self.device)

    def lengths(self) -> list[int]:
        """Of each request after the step."""
        pairs = zip(self.rows.tolist(), self.counts.tolist(), strict=True)
        return [0 if row == self.spare else int(self.computed[row]) + count for row, count in pairs]

    def check_inputs(self) -> None:
        adapters = [NO_SLOT] * self.num_tokens
        ids, positions, slots = [0] * self.num_tokens, [0] * self.num_tokens, [[PAD_SLOT] * self.num_tokens for _ in self.sizes]
        token = 0
        for row, count in zip(self.rows.tolist(), self.counts.tolist(), strict=True):
            for position in range(int(self.computed[row]), int(self.computed[row]) + count):
                if row != self.spare:
                    adapters[token] = int(self.adapters[row])
                    ids[token], positions[token] = int(self.token_ids[row, position]), position
                    for group, size in enumerate(self.sizes):
                        block = int(self.tables[group, row, position // size])
                        slots[group][token] = block * size + position % size
                token += 1
        found = self.inputs
        assert found.input_ids.tolist() == ids and found.positions.tolist() == positions
        assert found.slot_mapping.tolist() == slots and found.token_slots.tolist() == adapters
        assert found.seq_lens.tolist() == self.lengths()
        assert found.logits_indices.tolist() == (self.starts[1:] - 1).tolist()

    def check_commit(self, form) -> None:
        sampled = self.rng.integers(0, 9999, (len(self.rows), 4)).astype(np.int32)
        results = torch.zeros(3, len(self.rows) + 2, 4, dtype=torch.int32, device=self.device)
        form.commit_step(self.tensor(sampled), self.step, self.inputs, self.state, results)
        tokens, computed = self.token_ids[: self.spare].copy(), self.computed[: self.spare].copy()
        for row, length, samples, of in zip(self.rows.tolist(), self.lengths(), self.samples.tolist(), sampled, strict=True):
            if row != self.spare:
                computed[row] = length
                if samples and length < tokens.shape[1]:
                    tokens[row, length] = of[0]
        assert np.array_equal(self.state.token_ids[: self.spare].cpu(), tokens)
        assert np.array_equal(self.state.num_computed[: self.spare].cpu(), computed)
        assert np.array_equal(results[2, : len(sampled)].cpu(), sampled) and not results[:2].any() and not results[2, -2:].any()


def check(form, seed: int, shape: tuple[int, int, int, int, int, int], device: str) -> None:
    case = Case(seed, shape, device)
    form.prepare_inputs(case.step, case.state, case.inputs)
    case.check_inputs()
    case.check_commit(form)


@pytest.mark.req("MR-05", "MR-06", "MR-07", "IB-08", "IB-10", "CG-06", "CG-07")
@pytest.mark.parametrize(
    "shape",
    [
        (6, 64, 3, 5, 0, 0),
        (6, 64, 6, 1, 0, 0),
        (6, 64, 2, 1, 4, 0),
        (6, 64, 1, 30, 0, 9),
        (300, 40, 140, 1, 20, 0),
        (9, 64, 9, 40, 0, 3),
        (1, 8, 1, 1, 0, 0),
    ],
    ids=["chunks", "decode", "padded decode", "tail", "several programs", "many tokens", "one row"],
)
def test_inputs_and_results_are_those_of_a_loop(form, triton_device, shape):
    check(form, 1, shape, triton_device if form is triton else "cpu")


def test_a_token_beyond_the_context_has_no_place(form, triton_device):
    case = Case(3, (2, 16, 1, 1, 0, 0), triton_device if form is triton else "cpu")
    row = int(case.rows[0])
    case.computed[row], case.samples[0] = 15, 1
    case.state.num_computed[row], case.step.samples[0] = 15, 1
    form.prepare_inputs(case.step, case.state, case.inputs)
    assert case.inputs.seq_lens.tolist() == [16]
    case.check_commit(form)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 8192, 256, 1, 0, 0), (256, 8192, 200, 1, 56, 0), (256, 8192, 256, 64, 0, 100)])
def test_a_gpu_derives_real_steps(triton_device, shape):
    for seed in range(5):
        check(triton, seed, shape, triton_device)


@pytest.mark.req("IB-01")
@pytest.mark.parametrize("seed", range(3))
def test_changes_arrive_where_they_belong_and_nowhere_else(form, triton_device, seed):
    device, rng = triton_device if form is triton else "cpu", np.random.default_rng(seed)
    shapes = [(40, 100), (7,), (2, 3, 50)]
    expected = [rng.integers(0, 9999, shape).astype(np.int32) for shape in shapes]
    targets = Targets([torch.from_numpy(array.copy()).to(device) for array in expected])
    runs, numbers, page = [], [], np.zeros(8192, np.int32)
    begin, taken = 11, {number: np.zeros(array.size, np.bool_) for number, array in enumerate(expected)}
    for _ in range(12):
        number = int(rng.integers(3))
        length = int(rng.integers(1, min(1024, expected[number].size) + 1)) if rng.random() < 0.5 else 1
        first = int(rng.integers(expected[number].size - length + 1))
        if taken[number][first : first + length].any():
            continue
        taken[number][first : first + length] = True
        values = rng.integers(0, 9999, length).astype(np.int32)
        expected[number].reshape(-1)[first : first + length] = values
        runs.append((number, first, length))
        numbers.append(values)
    at = begin + 4 * len(runs)
    for index, ((number, first, length), values) in enumerate(zip(runs, numbers, strict=True)):
        page[begin + 4 * index : begin + 4 * index + 4] = number, first, length, at
        page[at : at + length] = values
        at += length
    form.apply_changes(torch.from_numpy(page).to(device), begin, len(runs), targets)
    for target, array in zip(targets.tensors, expected, strict=True):
        assert np.array_equal(target.cpu(), array)
