"""The sampler's stages, its draws' distribution, and that rows do not disturb each other."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling import cpu
from penstock.kernels.sampling.buffers import Column
from penstock.kernels.sampling.cpu import CANDIDATES, apply_filters
from penstock.kernels.sampling.ops import CPU, SamplingOps, cpu_sampling_ops
from penstock.kernels.sampling.philox import Purpose, philox, uniform

LOGITS = torch.tensor([4.0, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.0])
DRAWS = 20_000
OPS = cpu_sampling_ops()


def choose(
    logits: torch.Tensor, params: list[SamplingParams], rows: np.ndarray, positions: np.ndarray, ops: SamplingOps = OPS
) -> torch.Tensor:
    """What comes of logits [m, vocab], whose rows belong to requests with these parameters."""
    sampler = Sampler(len(params), len(rows), logits.shape[1], torch.device("cpu"), ops)
    for row, each in enumerate(params):
        sampler.admit(row, each)
    changes = sampler.take_changes()
    sampler.params[changes.rows] = torch.from_numpy(changes.words)
    return sampler.sample(logits, torch.from_numpy(rows), torch.from_numpy(positions), sampler.path(rows))


def draw(logits: torch.Tensor, params: list[SamplingParams], positions: list[int], ops: SamplingOps = OPS) -> list[int]:
    """Tokens of rows with these logits [m, vocab], parameters and positions."""
    rows = np.arange(len(params), dtype=np.int32)
    return choose(logits, params, rows, np.array(positions, np.int32), ops)[:, Column.TOKEN].tolist()


def frequencies(params: SamplingParams, draws: int = DRAWS) -> np.ndarray:
    """How often each token comes at as many positions of one request."""
    rows, positions = np.zeros(draws, np.int32), np.arange(draws, dtype=np.int32)
    tokens = choose(LOGITS.expand(draws, -1), [params], rows, positions)[:, Column.TOKEN]
    return np.bincount(tokens.numpy(), minlength=len(LOGITS))


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor):
    """Log probabilities of these tokens, and of the likeliest ones."""
    buffers = Sampler(1, len(logits), logits.shape[1], torch.device("cpu"), CPU).buffers
    return CPU.logprobs(logits, token_ids.int(), counts.int(), int(counts.max()), True, buffers, False)


def chi_square_accepts(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Whether counts fit probabilities at a level of about 1e-4 (Wilson and Hilferty's approximation); none where none is due."""
    possible = expected > 0
    if counts[~possible].any():
        return False
    due = expected[possible] * counts.sum()
    degrees = max(1, int(possible.sum()) - 1)
    statistic = float(((counts[possible] - due) ** 2 / due).sum())
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    return statistic < limit


def filtered(kept: int, temperature: float = 1.0) -> np.ndarray:
    """The distribution over the first `kept` tokens, which are the likeliest."""
    weights = np.exp(LOGITS.double().numpy() / temperature)
    weights[kept:] = 0
    return weights / weights.sum()


@pytest.mark.req("SMP-07")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature):
    counts = frequencies(SamplingParams(max_tokens=1, temperature=temperature, seed=5))
    assert chi_square_accepts(counts, filtered(8, temperature))


@pytest.mark.req("SMP-08", "SMP-09", "SMP-21")
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_k": 8}, 8),
        ({"top_k": 100}, 8),
        # 0.524, 0.193, 0.117, 0.071, …
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.53}, 2),
        ({"top_p": 0.75}, 3),
        ({"top_p": 1e-9}, 1),
        # Of the top 3's own distribution: 0.63, 0.23, 0.14.
        ({"top_k": 3, "top_p": 0.8}, 2),
        # e^-2 = 0.135 is kept, e^-2.5 = 0.082 is not.
        ({"min_p": 0.1}, 4),
        ({"min_p": 1.0}, 1),
    ],
)
def test_filters_keep_the_right_tokens_and_their_proportions(params, kept):
    counts = frequencies(SamplingParams(max_tokens=1, temperature=1.0, seed=9, **params))
    assert np.count_nonzero(counts) == kept
    assert chi_square_accepts(counts, filtered(kept))


@pytest.mark.req("SMP-01")
def test_min_p_sees_the_distribution_after_temperature():
    """Flattened by 4, e^-1 = 0.37 of the top is what the fifth … last have; unflattened only two tokens would pass."""
    counts = frequencies(SamplingParams(max_tokens=1, temperature=4.0, min_p=0.36, seed=2))
    assert np.count_nonzero(counts) == 8


def test_ties_at_the_kth_place_go_to_the_smallest_ids():
    logits = torch.zeros(200, 6)
    params = [SamplingParams(max_tokens=1, temperature=1.0, top_k=2, seed=i) for i in range(200)]
    assert set(draw(logits, params, [0] * 200)) == {0, 1}
    assert draw(logits[:1], [SamplingParams(max_tokens=1, temperature=0.0)], [0]) == [0]


def check_filtered(logits: list[float], top_k: int, top_p: float, stays: list[int]) -> None:
    """By the definition: likeliest first, of equals the smallest id, until k or p is reached; p to float32's precision."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    assert stays == sorted(order[: len(stays)]) and stays
    weights = [math.exp(logits[token] - logits[order[0]]) for token in order]
    mass = [math.fsum(weights[:count]) / math.fsum(weights) for count in (len(stays) - 1, len(stays))]
    if top_p == 1.0:
        assert len(stays) == len(order)
    else:
        assert (len(stays) == 1 or mass[0] < top_p + 1e-5) and (mass[1] > top_p - 1e-5)


@pytest.mark.req("SMP-08", "SMP-09")
@settings(max_examples=60)
@given(st.data(), st.sampled_from([0.02, 0.5, 3.0]), st.booleans())
def test_filters_equal_their_definition_on_large_vocabularies(data, spread, tied):
    """Flat and steep, with ties and without, beyond the candidates and within."""
    vocab = CANDIDATES * 4
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))) * spread
    if tied:
        logits = (logits * 4).round() / 4
    top_k = data.draw(st.lists(st.sampled_from([0, 1, 40, 255, 256, 300, 1023, 5000]), min_size=3, max_size=3))
    top_p = data.draw(st.lists(st.sampled_from([0.0501, 0.3003, 0.9007, 0.9995, 1.0]), min_size=3, max_size=3))
    kept = apply_filters(logits, torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64))
    for row in range(3):
        stays = kept[row].isfinite().nonzero().squeeze(-1).tolist()
        check_filtered(logits[row].tolist(), top_k[row], top_p[row], stays)
        assert torch.equal(kept[row, stays], logits[row, stays])


@pytest.mark.req("SMP-09")
@pytest.mark.parametrize("vocab", [8, CANDIDATES + 8])
@pytest.mark.parametrize("top_k", [0, 8])
def test_a_top_p_that_ends_exactly_at_a_token_keeps_no_token_more(vocab, top_k):
    """Eight equally likely tokens: p of n/8 is reached by n of them."""
    logits = torch.full((7, vocab), float("-inf"))
    logits[:, :8] = -3.7
    top_p = torch.arange(1, 8, dtype=torch.float64) / 8
    kept = apply_filters(logits, torch.full((7,), top_k), top_p)
    assert kept.isfinite().sum(-1).tolist() == list(range(1, 8))
    above = apply_filters(logits, torch.full((7,), top_k), top_p + 1e-9)
    assert above.isfinite().sum(-1).tolist() == list(range(2, 9))


def row_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=st.just(1),
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        top_k=st.sampled_from([0, 1, 5, 40]),
        min_p=st.sampled_from([0.0, 0.05]),
        seed=st.integers(-(2**63), 2**64),
    )


@pytest.mark.req("SMP-05", "SMP-06", "SMP-13")
@settings(max_examples=60)
@given(st.lists(st.tuples(row_params(), st.integers(0, 1000)), min_size=1, max_size=8), st.integers(0, 2**32))
def test_a_rows_token_does_not_depend_on_its_neighbours(rows, seed):
    logits = torch.randn(len(rows), 367, generator=torch.Generator().manual_seed(seed)) * 3
    together = draw(logits, [params for params, _ in rows], [position for _, position in rows])
    for row, (params, position) in enumerate(rows):
        assert draw(logits[row : row + 1], [params], [position]) == [together[row]]
        if params.greedy:
            assert together[row] == int(logits[row].argmax())


@pytest.mark.req("SMP-04")
def test_greedy_rows_neither_sort_nor_draw(monkeypatch):
    """Whatever filters they ask for, and beside a row that does both."""
    rows = {"sorted": [], "drawn": []}
    likeliest, draw_from = cpu._likeliest, cpu.draw
    monkeypatch.setattr(cpu, "_likeliest", lambda logits, count: rows["sorted"].append(len(logits)) or likeliest(logits, count))
    monkeypatch.setattr(cpu, "draw", lambda logits, numbers: rows["drawn"].append(len(logits)) or draw_from(logits, numbers))
    greedy = SamplingParams(max_tokens=1, temperature=0.0, top_p=0.5, top_k=3)
    assert draw(LOGITS.expand(2, -1), [greedy] * 2, [0, 1], CPU) == [0, 0]
    assert rows == {"sorted": [], "drawn": []}
    drawn = SamplingParams(max_tokens=1, temperature=1.0, top_k=3)
    assert draw(LOGITS.expand(3, -1), [greedy, drawn, greedy], [0, 1, 2], CPU)[::2] == [0, 0]
    assert rows == {"sorted": [1], "drawn": [1]}


@pytest.mark.req("SMP-11")
@pytest.mark.parametrize(
    ("params", "spread", "sorted_tokens"),
    [
        ({}, 3.0, []),
        ({"min_p": 0.1}, 3.0, []),
        ({"top_k": 40}, 3.0, [CANDIDATES]),
        ({"top_p": 0.9}, 9.0, [CANDIDATES]),
        # More than the candidates could stay.
        ({"top_k": CANDIDATES + 1}, 3.0, [CANDIDATES, 1024]),
        ({"top_p": 0.9}, 0.1, [CANDIDATES, 1024]),
        ({"top_k": 40, "temperature": 0.0}, 3.0, []),
    ],
)
def test_the_whole_vocabulary_is_sorted_only_where_it_must_be(monkeypatch, params, spread, sorted_tokens):
    counts, likeliest = [], cpu._likeliest
    monkeypatch.setattr(cpu, "_likeliest", lambda logits, count: counts.append(count) or likeliest(logits, count))
    logits = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0)) * spread
    draw(logits, [SamplingParams(**({"max_tokens": 1, "temperature": 1.0} | params))], [0], CPU)
    assert counts == sorted_tokens


@pytest.mark.req("SMP-14")
def test_random_numbers_reach_a_tail_that_float32_would_lose():
    """256 tokens share 2^-33 of the probability: in float32 nothing is added to 1, and the last number below 1 is too small."""
    logits = torch.full((1, 257), math.log(2**-41))
    logits[0, 0] = 0.0
    assert cpu.draw(logits, torch.tensor([1 - 2**-34], dtype=torch.float64)).item() in range(100, 160)
    assert cpu.draw(logits, torch.tensor([1 - 2**-32], dtype=torch.float64)).item() == 0
    assert uniform(torch.tensor([1]), torch.tensor([1]), Purpose.SAMPLE).dtype == torch.float64


def test_philox_gives_the_published_numbers():
    """Known answers of the authors' Random123 library."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    cases = [
        ([0] * 6, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 6, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]
    for words, expected in cases:
        c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in words)
        assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == expected


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position():
    count = 20_000
    for seeds, positions in (
        (torch.full((count,), 3), torch.arange(count)),
        (torch.arange(count), torch.full((count,), 3)),
    ):
        numbers = uniform(seeds, positions, Purpose.SAMPLE)
        assert len(numbers.unique()) == count and numbers.min() >= 0 and numbers.max() < 1
        assert chi_square_accepts(numbers.histc(20, 0, 1).numpy(), np.full(20, 0.05))


@pytest.mark.req("LP-01", "LP-03")
def test_logprobs_and_ranks():
    logits = torch.stack((LOGITS, LOGITS.flip(0)))
    found = gather_logprobs(logits, torch.tensor([2, 7]), torch.tensor([3, 1]))
    exact = LOGITS.double().log_softmax(-1)
    torch.testing.assert_close(found.sampled.double(), exact[[2, 0]], rtol=0, atol=1e-6)
    assert (found.ranks.tolist(), found.top_ids.tolist()) == ([2, 0], [[0, 1, 2], [7, -1, -1]])
    torch.testing.assert_close(found.top_logprobs[0].double(), exact[:3], rtol=0, atol=1e-6)


@pytest.mark.req("LP-03")
def test_equally_likely_tokens_share_the_best_of_their_ranks():
    """A rank is the number of tokens that are likelier."""
    logits = torch.tensor([[2.0, 3.0, 2.0, 1.0, 3.0, 2.0]]).expand(6, -1)
    found = gather_logprobs(logits, torch.arange(6), torch.zeros(6, dtype=torch.int64))
    assert found.ranks.tolist() == [2, 0, 2, 5, 0, 2]


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_alternatives_depend_on_no_other_row_though_logits_are_equal(vocab, distinct, seed):
    # bfloat16 gives many equal logits; which of them topk takes depends on how many it is asked for.
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, distinct, (3, vocab)).astype(np.float32))
    counts = torch.tensor([2, 5, 0]).clamp(max=vocab)
    sampled = torch.zeros(3, dtype=torch.int64)
    found = gather_logprobs(logits, sampled, counts)
    for row, count in enumerate(counts.tolist()):
        best = sorted(range(vocab), key=lambda token: (-logits[row, token].item(), token))[:count]
        assert found.top_ids[row, :count].tolist() == best
        alone = gather_logprobs(logits[row : row + 1], sampled[:1], counts[row : row + 1])
        assert alone.top_ids[0, :count].tolist() == best
        assert torch.equal(alone.top_logprobs[0, :count], found.top_logprobs[row, :count])


def test_counts_what_is_not_finite():
    logits = torch.zeros(4, 5)
    logits[1, 2], logits[3, 0], logits[3, 1] = float("nan"), float("inf"), float("-inf")
    result = choose(logits, [SamplingParams(max_tokens=1, temperature=0.0)], np.zeros(4, np.int32), np.zeros(4, np.int32))
    assert result[:, Column.NANS :].tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 2, 0]]
