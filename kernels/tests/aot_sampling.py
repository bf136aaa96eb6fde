"""The sampling kernels as a vocabulary of 151,936 launches them; see aot_gates."""

from collections.abc import Callable

import torch
from aot_dense import empty

from penstock.kernels.sampling.buffers import Path, SamplingBuffers
from penstock.kernels.sampling.ops import triton_sampling_ops
from penstock.kernels.sampling.params import WORDS

VOCAB, ROWS = 151_936, 256
OPS = triton_sampling_ops()


def ints(*shape: int) -> torch.Tensor:
    """int32."""
    return empty(*shape, dtype=torch.int32)


def draws() -> None:
    """Tokens of greedy rows, of rows that draw from all tokens, and of filtered ones; of filtered ones with changed logits."""
    params, buffers = ints(ROWS + 1, WORDS), SamplingBuffers.allocate(ROWS, VOCAB, torch.device("meta"))
    for path in Path:
        OPS.sample(empty(ROWS, VOCAB), ints(ROWS), ints(ROWS), params, buffers, path, False)
    OPS.sample(empty(1, VOCAB, dtype=torch.float32), ints(1), ints(1), params, buffers, Path.FILTERED, True)


def scores() -> None:
    """Logprobs, and penalties of rows of 8,192 tokens."""
    buffers = SamplingBuffers.allocate(ROWS, VOCAB, torch.device("meta"))
    OPS.logprobs(empty(ROWS, VOCAB), ints(ROWS), ints(ROWS), 20, True, buffers, False)
    logits, of = empty(ROWS, VOCAB, dtype=torch.float32), ints(64)
    OPS.penalise(logits, of, ints(ROWS + 1, 8192), of, of, of, empty(64, 3, dtype=torch.float32), 8192)


def parts() -> None:
    """Logprobs of rows that are not the first of those whose tokens and counts were uploaded."""
    buffers = SamplingBuffers.allocate(ROWS, VOCAB, torch.device("meta"))
    OPS.logprobs(empty(7, VOCAB), ints(8)[1:], ints(8)[1:], 5, True, buffers, False)


LAUNCHES: list[Callable[[], None]] = [draws, scores]
