"""The sampler's forms: the same tokens from the same logits, parameters and positions; and what it keeps of a request."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.buffers import Column, Path
from penstock.kernels.sampling.ops import CPU, REFERENCE, SamplingOps

ROWS = 8
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40, 10_000]),
    top_p=st.sampled_from([1.0, 0.9017, 0.5371, 1e-9]),  # no ratio of small numbers: of equals the CPU rounds some out
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    seed=st.integers(-(2**70), 2**70),
)


def sampler(vocab: int, ops: SamplingOps = REFERENCE) -> Sampler:
    """Over CPU tensors."""
    return Sampler(ROWS, ROWS, vocab, torch.device("cpu"), ops)


def admit(device: Sampler, params: list[SamplingParams]) -> None:
    """Into the first rows, as a step's changes bring them to the device."""
    for row, each in enumerate(params):
        device.admit(row, each)
    changes = device.take_changes()
    device.params[changes.rows] = torch.from_numpy(changes.words)


def tensor(values: list[int]) -> torch.Tensor:
    """[m], int32."""
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.req("SMP-05", "SMP-13")
@given(st.lists(PARAMS, min_size=1, max_size=ROWS), st.integers(0, 2**31 - 1), st.booleans(), st.sampled_from([3, 131, 700]))
def test_tokens_are_those_of_the_cpu(params, position, ties, vocab):
    torch.manual_seed(position)
    logits = torch.randn(len(params), vocab) * 4
    if ties:
        logits = logits.round()
    rows, found = np.arange(len(params), dtype=np.int32), []
    for ops in (CPU, REFERENCE):
        device = sampler(vocab, ops)
        admit(device, params)
        result = device.sample(logits, torch.from_numpy(rows), tensor([position] * len(params)), device.path(rows))
        assert not result[:, Column.NANS :].any()
        found.append(result[:, Column.TOKEN].tolist())
    assert found[0] == found[1]


def test_changes_are_taken_once_and_a_row_holds_what_was_admitted_last():
    device = sampler(vocab=8)
    device.admit(3, SamplingParams(max_tokens=1, temperature=0.0))
    device.admit(3, SamplingParams(max_tokens=1, temperature=0.5, seed=7))
    changes = device.take_changes()
    assert changes.rows.tolist() == [3]
    assert not len(device.take_changes().rows)
    assert device.path(np.array([3], np.int32)) is Path.RANDOM
    assert device.path(np.array([0, 8], np.int32)) is Path.GREEDY


@pytest.mark.req("SMP-11")
@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"temperature": 0.0, "top_k": 3}, Path.GREEDY),
        ({"top_k": 0}, Path.RANDOM),
        ({"top_k": 3}, Path.FILTERED),
        ({"top_p": 0.9}, Path.FILTERED),
        ({"min_p": 0.1}, Path.FILTERED),
    ],
)
def test_a_row_s_path_is_the_least_that_serves_it(params, path):
    device = sampler(vocab=8)
    device.admit(0, SamplingParams(max_tokens=1, **params))
    assert device.path(np.array([0], np.int32)) is path


@pytest.mark.req("SMP-23")
@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=lambda ops: ops.form)
def test_broken_and_masked_rows_are_told_apart_and_give_a_token_of_the_vocabulary(ops):
    device = sampler(16, ops)
    admit(
        device, [SamplingParams(max_tokens=1, temperature=temperature, top_k=3) for temperature in (0.0, 1.0) for _ in range(4)]
    )
    nothing = float("-inf")
    logits = torch.randn(ROWS, 16)
    for row in (0, 4):
        logits[row, 3:5], logits[row, 9], logits[row, 10] = float("nan"), float("inf"), nothing
        logits[row + 1] = nothing
        logits[row + 2, :15] = nothing
    rows = tensor(list(range(ROWS)))
    raw = device.sample(logits, rows, rows).clone()
    masked = device.sample(logits, rows, rows, masked=True)
    for row in (0, 4):
        assert raw[row : row + 4, Column.NANS].tolist() == [2, 0, 0, 0]
        assert raw[row : row + 4, Column.INFINITIES].tolist() == [2, 16, 15, 0]
        assert masked[row : row + 4, Column.INFINITIES].tolist() == [1, 0, 0, 0]
        assert masked[row : row + 4, Column.NOTHING_LEFT].tolist() == [0, 1, 0, 0]
        assert masked[row + 2, Column.TOKEN] == 15
    assert ((masked[:, Column.TOKEN] >= 0) & (masked[:, Column.TOKEN] < 16)).all()
    assert masked.dtype == torch.int32
