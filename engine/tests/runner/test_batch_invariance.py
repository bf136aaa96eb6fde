"""A request's results have the same bits whatever its neighbours, chunks, cached prefix and physical blocks. The cache is
poisoned with NaN before each run, so that nothing outside the request's own tokens can be read unnoticed."""

import numpy as np
import pytest
import torch
from tiny_models import DENSE, MOE

from penstock.engine.sampling import SamplingParams
from penstock.kernels.cpu.isa import available

VOCAB = 257
RANDOM = SamplingParams(max_tokens=100, temperature=0.8, top_p=0.95, seed=11, logprobs=VOCAB)
PENALISED = SamplingParams(
    max_tokens=100,
    temperature=0.0,
    logprobs=VOCAB,
    presence_penalty=0.5,
    frequency_penalty=1.0,
    repetition_penalty=1.4,
    logit_bias=((5, 2.0), (9, -3.0)),
    bad_words=tuple((token, other) for token in range(VOCAB) for other in range(token % 9, VOCAB, 9)),
)
VARIANTS = [("llama", "float32"), ("llama-7to1-llama3-tied", "float32"), ("llama-mha-linear-bias", "float32")]
VARIANTS += [("qwen3", "float32"), ("llama", "bfloat16"), ("qwen3", "bfloat16"), ("llama", "float16")]
VARIANTS += [("qwen3-windows", "float32"), ("qwen3-windows", "bfloat16", "reference")]
VARIANTS += [
    ("llama", "float32", "reference"),
    ("qwen3", "bfloat16", "reference"),
    ("llama-7to1-llama3-tied", "float32", "reference"),
]
FAMILY_NAMES = ["qwen2-yarn", "mistral-7to1-window", "gemma2", "gemma3", "phi3-longrope", "olmo2", *DENSE, *MOE]
OF_EACH_ISA = [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "bfloat16")]
VARIANTS += [(*variant, isa.name) for isa in available()[1:] for variant in OF_EACH_ISA]
CASES = [pytest.param(variant, RANDOM, id="-".join(variant)) for variant in VARIANTS]
# Penalties look at a row's tokens, not at how its logits were computed.
PENALISED_VARIANTS = [("llama", "float32"), ("qwen3-windows", "bfloat16", "reference")]
CASES += [pytest.param(variant, PENALISED, id="-".join((*variant, "penalised"))) for variant in PENALISED_VARIANTS]
in_every_case = pytest.mark.parametrize(("runner", "params"), CASES, indirect=["runner"])


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


class Trace:
    """The sampled tokens of one sequence and all their log probabilities."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[np.ndarray] = []

    def add(self, result, index: int) -> None:
        if result.counts[index]:
            where = result.logprobs.plan_rows.tolist().index(index)
            self.tokens.append(int(result.token_ids[index, 0]))
            order = np.argsort(result.logprobs.top_ids[where])
            self.logprobs.append(result.logprobs.top_logprobs[where][order])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Trace)
            and self.tokens == other.tokens
            and all(np.array_equal(a, b) for a, b in zip(self.logprobs, other.logprobs, strict=True))
        )


def run_alone(play, tokens, params, chunk=1000, outputs=6, **cached) -> tuple[Trace, object]:
    trace, sequence = Trace(), play.admit(tokens, params, **cached)
    while len(trace.tokens) < outputs:
        trace.add(play.step([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))]), 0)
    return trace, sequence


@pytest.fixture(params=VARIANTS, ids="-".join)
def runner(request, loaded):
    return loaded(*request.param)


@pytest.fixture(scope="module")
def traces() -> dict[tuple[int, int | None], Trace]:
    """What was expected so far, by runner and seed: it takes as long as what is held to it."""
    return {}


@pytest.fixture
def expected(runner, driver, params, traces) -> Trace:
    key = id(runner), params.seed
    if key not in traces:
        traces[key] = run_alone(driver(runner), prompt(1, 200), params)[0]
    return traces[key]


@pytest.mark.slow
@pytest.mark.req("CHK-05", "CHK-06")
@in_every_case
@pytest.mark.parametrize("chunk", [1, 16, 77])
def test_chunks(runner, driver, params, expected, chunk):
    assert run_alone(driver(runner, seed=chunk), prompt(1, 200), params, chunk)[0] == expected


@in_every_case
def test_cached_prefix(runner, driver, params, expected):
    play = driver(runner)
    _, first = run_alone(play, prompt(1, 200)[:180] + prompt(9, 10), params)
    for blocks in (1, 8, 11):
        assert run_alone(play, prompt(1, 200), params, cached=first, blocks=blocks)[0] == expected


@pytest.mark.req("SMP-13")
@in_every_case
@pytest.mark.parametrize("crowd", [2, 9])
def test_neighbours(runner, driver, params, expected, crowd):
    """Others prefill, decode and end around it, before and after it in the batch."""
    play, rng = driver(runner, seed=crowd), np.random.default_rng(crowd)
    others = [play.admit(prompt(100 + i, int(rng.integers(2, 120))), (RANDOM, PENALISED)[i % 2]) for i in range(crowd)]
    sequence, trace = play.admit(prompt(1, 200), params), Trace()
    while len(trace.tokens) < 6:
        work = [(other, int(rng.integers(1, len(other.tokens) - other.computed + 1))) for other in others]
        index = int(rng.integers(0, len(work) + 1))
        remaining = len(sequence.tokens) - sequence.computed
        work.insert(index, (sequence, min(remaining, int(rng.integers(1, 90)))))
        trace.add(play.step(work), index)
        if rng.random() < 0.2:
            gone = others.pop()
            play.release(gone)
            others.append(play.admit(prompt(int(rng.integers(200, 300)), 30), RANDOM))
    assert trace == expected


@in_every_case
def test_resumes_after_preemption(runner, driver, params, expected):
    """All tokens known so far are computed again, in another row and other blocks."""
    play = driver(runner, seed=5)
    trace, sequence = run_alone(play, prompt(1, 200), params, outputs=3)
    play.release(sequence)
    play.admit(prompt(2, 5), params)
    resumed, _ = run_alone(play, sequence.tokens, params, chunk=50, outputs=3, num_prompt_tokens=200)
    assert trace.tokens + resumed.tokens == expected.tokens
    assert all(np.array_equal(a, b) for a, b in zip(trace.logprobs + resumed.logprobs, expected.logprobs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_family(name, dtype, loaded, driver):
    """In chunks beside others, after a cached prefix."""
    runner, tokens = loaded(name, dtype), prompt(1, 150)
    expected, _ = run_alone(driver(runner), tokens, RANDOM, outputs=4)
    play = driver(runner, seed=3)
    first = play.admit(tokens[:100] + prompt(9, 10), RANDOM)
    play.step([(first, 60), (play.admit(prompt(4, 30), PENALISED), 30)])
    play.step([(first, 50)])
    sequence, trace = play.admit(tokens, RANDOM, cached=first, blocks=4), Trace()
    while len(trace.tokens) < 4:
        gap = len(sequence.tokens) - sequence.computed
        trace.add(play.step([(first, 1), (sequence, min(gap, 37))]), 1)
    assert trace == expected


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 64])
def test_prompt_logprobs(runner, driver, chunk):
    """In one chunk alone, and in several beside a neighbour."""
    asks, scores = SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=VOCAB), []
    play = driver(runner)
    whole = play.step([(play.admit(prompt(1, 200), asks), 200)]).prompt_logprobs
    play = driver(runner, seed=chunk)
    sequence, other = play.admit(prompt(1, 200), asks), play.admit(prompt(2, 20))
    while sequence.computed < 200:
        gap = len(other.tokens) - other.computed
        found = play.step([(other, gap), (sequence, min(chunk, 200 - sequence.computed))]).prompt_logprobs
        scores += [] if found is None else [found]
    for name in ("positions", "token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in scores]), getattr(whole, name)), name


def test_the_poison_is_there(loaded, driver):
    """Without it the tests above would show nothing of what is read."""
    play = driver(loaded("llama"))
    play.step([(play.admit(prompt(1, 20), RANDOM), 20)])
    assert all(torch.isnan(cache).any() and torch.isfinite(cache).any() for cache in play.runner.kv_caches)
