"""Masked rows draw from the model's distribution over the allowed tokens, with everything else that a request asks for."""

import msgspec
import numpy as np
import pytest
from test_device_choice import VOCAB, Requests, logits_of, on_cpu
from test_masks import bits
from test_sampler import chi_square_accepts

from penstock.engine.core.plan import SampleInputs
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.buffers import Column

pytestmark = pytest.mark.slow

SEEDS = 1000
PROMPT, OUTPUT = [3, 3, 8], [8, 9, 9]
ALLOWED = {3, 8, 9, *range(20, 60), 64, VOCAB - 1}
"""Some of them are in the prompt or the output, so that penalties act on allowed tokens too."""
LOGITS = logits_of(1, seed=3) / 4


def expected(params: SamplingParams) -> np.ndarray:
    """Probabilities by the definition: mask, bias, penalties, temperature, min-p, top-k, top-p, in that order."""
    logits = np.full(VOCAB, -np.inf)
    logits[list(ALLOWED)] = LOGITS[0].double().numpy()[list(ALLOWED)]
    for token, bias in params.logit_bias or ():
        logits[token] += bias
    for token in {*PROMPT, *OUTPUT}:
        repetition = params.repetition_penalty
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in OUTPUT:
        logits[token] -= params.frequency_penalty
    for token in set(OUTPUT):
        logits[token] -= params.presence_penalty
    found = np.exp(logits / params.temperature - (logits / params.temperature).max())
    found[found < params.min_p] = 0
    if params.top_k:
        found[np.argsort(-found)[params.top_k :]] = 0
    order = np.argsort(-found)
    before = np.cumsum(found[order]) - found[order]
    found[order[before >= params.top_p * found.sum()]] = 0
    return found / found.sum()


@pytest.mark.req("SO-01")
@pytest.mark.parametrize("make", [on_cpu, Requests], ids=["cpu", "device"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 5.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 0.7, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": -0.9, "logit_bias": ((30, 1.5), (70, 9.0))},
        {"temperature": 1.3, "top_p": 0.95, "repetition_penalty": 0.7, "presence_penalty": 0.5},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_masked_draws_follow_the_distribution_restricted_and_renormalised(make, fields):
    """A request for each seed, and new seeds each round: 10^5 draws on a CPU where most is asked for, and 25,000 else."""
    rounds = 100 if make is on_cpu and len(fields) == 4 and "top_p" in fields else 25
    params = SamplingParams(max_tokens=9, **{"temperature": 1.0, **fields})
    rows = make([(PROMPT, OUTPUT, fields | {"temperature": params.temperature, "seed": row}) for row in range(SEEDS)])
    inputs = SampleInputs(1, rows.rows, np.repeat(bits(ALLOWED), SEEDS, axis=0))
    logits, counts = LOGITS.repeat(SEEDS, 1), np.zeros(VOCAB, np.int64)
    for number in range(rounds):
        for row in range(SEEDS):
            rows.sampler.admit(row, msgspec.structs.replace(params, seed=number * SEEDS + row))
        rows.write_params()
        tokens = rows.choose(logits, inputs=inputs).result[:, Column.TOKEN]
        counts += np.bincount(tokens.numpy(), minlength=VOCAB)
    due = expected(params)
    assert counts.sum() == SEEDS * rounds and set(np.flatnonzero(due)) <= ALLOWED
    assert chi_square_accepts(counts, due)
    assert np.abs(counts / counts.sum() - due).sum() / 2 < (0.02 if rounds == 100 else 0.03)
