"""Logprobs and penalties on a GPU against their torch reference, interpreted here and compiled on a GPU."""

import pytest
import torch

from penstock.kernels.sampling import reference
from penstock.kernels.sampling.buffers import SamplingBuffers
from penstock.kernels.sampling.ops import triton_sampling_ops

OPS = triton_sampling_ops()


@pytest.mark.slow
@pytest.mark.req("LP-02", "LP-03")
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"),
    [
        (4, 131, torch.float32),
        (3, 700, torch.bfloat16),
        (3, 7, torch.float32),
        pytest.param(64, 151_936, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_logprobs_equal_the_reference(triton_device, rows, vocab, dtype, normalised):
    torch.manual_seed(vocab)
    logits = (torch.randn(rows, vocab) * 3).round(decimals=1).to(dtype)
    logits[0] = logits[0].round()  # equals everywhere
    logits[1, 2:] = float("-inf")  # fewer left than asked for
    token_ids = logits.argmin(-1).int()
    token_ids[1] = 0
    counts = torch.tensor([20, 5, 0, 20] * rows, dtype=torch.int32)[:rows].clamp(max=vocab)
    width = int(counts.max())
    buffers = SamplingBuffers.allocate(rows, vocab, torch.device(triton_device))
    expected = reference.logprobs(logits, token_ids, counts, width, normalised, buffers, True)
    given = (tensor.to(triton_device) for tensor in (logits, token_ids, counts))
    found = OPS.logprobs(*given, width, normalised, buffers, True)
    for name, here, there in zip(expected._fields, expected, found, strict=True):
        torch.testing.assert_close(there.cpu(), here, atol=2e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.req("LP-03")
def test_equally_likely_tokens_share_the_best_of_their_ranks(triton_device):
    """A rank is the number of tokens that are likelier."""
    logits = torch.tensor([[2.0, 3.0, 2.0, 1.0, 3.0, 2.0]]).repeat(6, 1)
    counts, token_ids = torch.zeros(6, dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    buffers = SamplingBuffers.allocate(6, 6, torch.device(triton_device))
    for form, device in ((reference.logprobs, "cpu"), (OPS.logprobs, triton_device)):
        given = [tensor.to(device) for tensor in (logits, token_ids, counts)]
        assert form(*given, 1, True, buffers).ranks.tolist() == [2, 0, 2, 5, 0, 2]


def test_broken_logits_are_counted_and_too_many_alternatives_refused(triton_device):
    logits = torch.randn(2, 140)
    logits[1, 3], logits[1, 4:6] = float("nan"), float("-inf")
    token_ids = torch.zeros(2, dtype=torch.int32)
    buffers = SamplingBuffers.allocate(2, 140, torch.device(triton_device))
    for form, device in ((reference.logprobs, "cpu"), (OPS.logprobs, triton_device)):
        given = [tensor.to(device) for tensor in (logits, token_ids, token_ids)]
        assert form(*given, 1, True, buffers).bad.tolist() == [[0, 0], [1, 2]]
        with pytest.raises(ValueError, match="65 alternatives: more than 64"):
            form(*given, 65, True, buffers)


@pytest.mark.req("SMP-15", "SMP-16")
@pytest.mark.parametrize(("vocab", "longest"), [(131, 40), (9, 300), pytest.param(151_936, 8192, marks=pytest.mark.gpu)], ids=str)
def test_penalties_equal_the_reference(triton_device, vocab, longest):
    torch.manual_seed(longest)
    logits, token_ids = torch.randn(5, vocab) * 3, torch.randint(0, vocab, (6, longest + 7), dtype=torch.int32)
    token_ids[2, 0] = vocab + 3  # a prompt's token that the model does not know
    logits[:, 1] = float("-inf")
    at, rows = torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor([5, 2, 0], dtype=torch.int32)
    begins = torch.tensor([3, longest // 2, 0], dtype=torch.int32)
    ends = torch.tensor([longest, longest // 2, 5], dtype=torch.int32)
    penalties = torch.tensor([[1.3, 0.25, -0.5], [0.7, 1.0, 1.0], [1.0, 0.1, 2.0]])
    here, there = logits.clone(), logits.clone().to(triton_device)
    reference.penalise(here, at, token_ids, rows, begins, ends, penalties, longest)
    given = (tensor.to(triton_device) for tensor in (at, token_ids, rows, begins, ends, penalties))
    OPS.penalise(there, *given, longest)
    assert torch.equal(there.cpu(), here)
    assert torch.equal(here[[1, 3]], logits[[1, 3]])
