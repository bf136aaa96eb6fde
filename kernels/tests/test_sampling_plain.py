"""The forms of sampling on a CPU, the reference among them, against plain Python arithmetic on one row at a time."""

import math
import shutil
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.kernels.cpu.build import COMPILERS
from penstock.kernels.cpu.isa import available
from penstock.kernels.sampling import cpu, reference
from penstock.kernels.sampling.buffers import Column, Path, SamplingBuffers
from penstock.kernels.sampling.ops import CPU, REFERENCE, SamplingOps, cpu_sampling_ops
from penstock.kernels.sampling.params import pack
from penstock.kernels.sampling.philox import Purpose, uniform

NOTHING = -math.inf
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.5, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.7013},
    {"temperature": 3.0, "top_p": 0.9871},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.0501},
    {"temperature": 1.7, "min_p": 0.003, "top_k": 30, "top_p": 0.8713},
    {"temperature": 2.9, "top_k": 300, "top_p": 0.9571},
]
"""A row each. Probabilities are no ratios of small numbers: of equal tokens, rounding would decide which is the last."""


@pytest.fixture(params=["reference", "torch", *(isa.name for isa in available())])
def form(request: pytest.FixtureRequest) -> SamplingOps:
    if request.param in ("reference", "torch"):
        return REFERENCE if request.param == "reference" else CPU
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("native sampling: no C++ compiler; apt-get install g++")
    return cpu_sampling_ops(request.param)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """The block function in Python's own integers."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0], second % 2**32, (first >> 32) ^ counter[3] ^ key[1], first % 2**32,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def number(seed: int, position: int) -> float:
    """The number in [0, 1) of a position."""
    seed %= 2**64
    high, low, *_ = philox([position % 2**32, position >> 32, 0, 0], [seed % 2**32, seed >> 32])
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53


def kept(row: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> dict[int, float]:
    """What filters leave of finite or -inf logits: scaled logits by token."""
    scaled = {token: float(np.float32(x) / np.float32(temperature)) for token, x in enumerate(row) if x > NOTHING}
    order = sorted(scaled, key=lambda token: (-scaled[token], token))
    if min_p:
        floor = scaled[order[0]] + math.log(min_p)
        order = [token for token in order if scaled[token] >= floor]
    order = order[:top_k] if top_k else order
    if top_p < 1:
        total, before, inside = sum(math.exp(scaled[it]) for it in order), 0.0, []
        for token in order:
            if not inside or before < top_p * total:
                inside.append(token)
            before += math.exp(scaled[token])
        order = inside
    return {token: scaled[token] for token in sorted(order)}


def chosen(row: list[float], at: float, **params: float) -> int:
    """The token of a row, `at` being its number in [0, 1)."""
    if params["temperature"] == 0:
        return max(range(len(row)), key=lambda token: (row[token], -token))
    left = kept(row, **params)  # type: ignore[arg-type]
    total, below = sum(math.exp(x) for x in left.values()), 0.0
    for token, x in left.items():
        below += math.exp(x)
        if below > at * total:
            return token
    raise AssertionError("nothing is left")


def table(params: list[dict], seeds: list[int]) -> torch.Tensor:
    rows = [pack(**{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **each}, seed=seed) for each, seed in zip(params, seeds, strict=True)]
    return torch.from_numpy(np.stack(rows))


def sample(
    form: SamplingOps, logits: torch.Tensor, params: list[dict], seeds: list[int], positions: list[int], masked: bool, **masks
):
    buffers = SamplingBuffers.allocate(len(logits) + 2, logits.shape[1], torch.device("cpu"))
    buffers.result.fill_(-7)
    rows = torch.arange(len(logits), dtype=torch.int32).flip(0)  # a row's parameters are found by its number
    at = torch.tensor(positions, dtype=torch.int32)
    return form.sample(logits, rows, at, table(params[::-1], seeds[::-1]), buffers, Path.FILTERED, masked, **masks), buffers, rows


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "spread"), [(11, 3.0), (257, 3.0), (700, 3.0), (9_000, 3.0), (9_000, 0.2)])
def test_a_row_s_token_and_what_its_filters_leave_are_those_of_the_definition(
    form: SamplingOps, vocab: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(PARAMS), vocab, generator=generator) * spread
    for position in (0, 3, 2**31 - 1) if vocab < 9_000 else (3,):
        seeds = [(7919 * row * row * 2**31 + position) % 2**63 for row in range(len(PARAMS))]
        result, buffers, rows = sample(form, logits, PARAMS, seeds, [position] * len(PARAMS), False)
        wanted = [
            chosen(row, number(seed, position), **params)
            for row, seed, params in zip(logits.tolist(), seeds, PARAMS, strict=True)
        ]
        assert result[:, Column.TOKEN].tolist() == wanted
        assert result[:, Column.NANS :].count_nonzero() == 0
        assert (buffers.result[len(PARAMS) :] == -7).all()
    at = torch.arange(1, len(PARAMS))
    left = form.processed(logits, at, rows[at], table(PARAMS[::-1], seeds[::-1]), buffers)
    for index, params in zip(at.tolist(), PARAMS[1:], strict=True):
        found = {token: x for token, x in enumerate(left[index - 1].tolist()) if x > NOTHING}
        assert found == pytest.approx(kept(logits[index].tolist(), **params), rel=1e-6), params
    greedy = form.processed(logits, at[:0].new_tensor([0]), rows[:1], table(PARAMS[::-1], seeds[::-1]), buffers)
    assert torch.equal(greedy[0], logits[0])


def test_logits_of_16_bits_are_widened_before_anything_is_done_to_them(form: SamplingOps) -> None:
    logits = (torch.randn(len(PARAMS), 700) * 3).bfloat16()
    numbers, at, found = list(range(len(PARAMS))), torch.arange(len(PARAMS)), []
    given = table(PARAMS[::-1], numbers[::-1])
    for each in (logits, logits.float()):
        result, buffers, rows = sample(form, each, PARAMS, numbers, numbers, False)
        found.append((result, form.processed(each, at, rows, given, buffers)))
    (narrow, left), (wide, expected) = found
    assert torch.equal(narrow, wide)
    assert left.dtype is torch.float32 and torch.equal(left, expected)


def test_of_equal_logits_the_smallest_ids_stay_and_the_first_is_the_greedy_one(form: SamplingOps) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]).repeat(2, 1)
    params = [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 2}]
    for seed in range(8):
        (greedy, *_), (drawn, *_) = sample(form, logits, params, [seed, seed], [5, 5], False)[0].tolist()
        assert greedy == 1
        assert drawn == (1 if number(seed, 5) < 0.5 else 2)


@pytest.mark.parametrize("masked", [False, True])
def test_broken_logits_are_counted_never_chosen_and_a_row_of_nothing_says_so(form: SamplingOps, masked: bool) -> None:
    nan, infinite = math.nan, math.inf
    rows = [
        [1.0, nan, nan, 3.0, 2.0, NOTHING],
        [1.0, infinite, NOTHING, 0.5, NOTHING, 0.0],
        [0.5, 2.5, 1.5, 3.5, 0.0, 1.0],
        [NOTHING] * 6,
    ]
    logits = torch.tensor(rows)
    for temperature in (0.0, 1.0):
        params = [{"temperature": temperature}] * 4
        result = sample(form, logits, params, [1, 2, 3, 4], [9] * 4, masked)[0]
        counts = [[2, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]] if masked else [[2, 1, 0], [0, 3, 0], [0, 0, 0], [0, 6, 1]]
        assert result[:, Column.NANS :].tolist() == counts
        finite = [[x if math.isfinite(x) else NOTHING for x in row] for row in rows[:3]]
        wanted = [chosen(row, number(seed, 9), temperature=temperature) for seed, row in enumerate(finite, 1)]
        assert result[:3, Column.TOKEN].tolist() == wanted
        assert 0 <= result[3, Column.TOKEN] < 6


def test_a_mask_alone_is_no_broken_logit(form: SamplingOps) -> None:
    logits = torch.tensor([[NOTHING, 2.0, 1.0], [1.0, NOTHING, 0.0]])
    assert sample(form, logits, [{"temperature": 0.0}] * 2, [0, 0], [0, 0], True)[0].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(("normalised", "masked"), [(True, False), (False, True)])
def test_log_probabilities_ranks_and_alternatives_are_those_of_the_definition(
    form: SamplingOps, normalised: bool, masked: bool
) -> None:
    rows = [[1.0, 4.0, 2.0, 4.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0], [1.0, math.nan, 3.0, NOTHING, math.inf]]
    tokens, counts, width = [2, 4, 0], [3, 0, 4], 4
    buffers = SamplingBuffers.allocate(3, 5, torch.device("cpu"))
    found = form.logprobs(
        torch.tensor(rows), torch.tensor(tokens).int(), torch.tensor(counts).int(), width, normalised, buffers, masked
    )
    assert found.bad.tolist() == [[0, 0], [0, 0], [1, 1 if masked else 2]]
    assert found.ranks.tolist() == [2, 0, 1]
    for at, (row, token, count) in enumerate(zip(rows, tokens, counts, strict=True)):
        finite = [x if math.isfinite(x) else NOTHING for x in row]
        norm = math.log(sum(math.exp(x) for x in finite)) if normalised else 0.0
        values = [x - norm for x in finite]
        assert found.sampled[at].item() == pytest.approx(values[token], abs=1e-6)
        order = sorted(range(5), key=lambda it: (-values[it], it))[:count]
        likely = [it for it in order if values[it] > NOTHING]  # which of those that cannot come is told means nothing
        assert found.top_ids[at].tolist()[: len(likely)] == likely
        assert found.top_ids[at].tolist()[count:] == [-1] * (width - count)
        assert found.top_logprobs[at].tolist() == pytest.approx(
            [values[it] for it in order] + [NOTHING] * (width - count), abs=1e-6
        )


def test_the_reference_has_room_for_so_many_alternatives_and_no_more() -> None:
    logits, ids = torch.randn(1, 9), torch.zeros(1, dtype=torch.int32)
    buffers = SamplingBuffers.allocate(1, 9, torch.device("cpu"), candidates=4)
    assert reference.logprobs(logits, ids, ids + 4, 4, True, buffers).top_ids.shape == (1, 4)
    with pytest.raises(ValueError, match="5 alternatives: more than 4"):
        reference.logprobs(logits, ids, ids + 4, 5, True, buffers)


def test_a_copy_to_be_changed_has_zeros_in_broken_rows_alone(form: SamplingOps) -> None:
    logits = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [NOTHING, math.inf], [3.0, 4.0]])
    copy, bad = form.clean(logits)
    assert copy.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]]
    assert bad.tolist() == [[0, 0], [1, 0], [0, 2], [0, 0]]
    sound = torch.tensor([[1.0, 2.0]])
    copy, bad = form.clean(sound)
    copy[0, 0] = 9.0
    assert sound.tolist() == [[1.0, 2.0]] and bad.tolist() == [[0, 0]]


@pytest.mark.parametrize("vocab", [5, 32, 40, 70])
def test_a_mask_leaves_the_tokens_whose_bits_are_set(form: SamplingOps, vocab: int) -> None:
    allowed = [{0, 3, 31, 32, 39}, {1, 4, 33, 64, 69}]
    words = -(-vocab // 32)
    bits = [[sum(1 << (token % 32) for token in each if token // 32 == word) for word in range(words)] for each in allowed]
    bitmask = torch.from_numpy(np.array(bits, np.uint32).view(np.int32))
    logits = torch.arange(3 * vocab).float().view(3, vocab)
    form.mask(logits, torch.tensor([2, 0]), bitmask)
    for row, each in ((2, allowed[0]), (0, allowed[1]), (1, set(range(vocab)))):
        wanted = [float(vocab * row + token) if token in each else NOTHING for token in range(vocab)]
        assert logits[row].tolist() == wanted


def test_no_token_beyond_the_mask_may_be_chosen(form: SamplingOps) -> None:
    logits = torch.zeros(1, 40)
    form.mask(logits, torch.tensor([0]), torch.full((1, 1), -1, dtype=torch.int32))
    assert (logits[0, :32] == 0).all() and logits[0, 32:].isneginf().all()


@pytest.mark.parametrize("places", [range(60), range(3, 50), range(0, 60, 2), [5, 4, 7, 1]])
def test_many_masks_at_a_time_are_each_for_their_row(form: SamplingOps, places: Sequence[int]) -> None:
    """More logits than are masked at a time; neighbours, or rows here and there."""
    vocab, draw = 5_000, np.random.default_rng(0)
    bitmask = draw.integers(-(2**31), 2**31 - 1, (len(places), -(-vocab // 32)), dtype=np.int32)
    logits = torch.from_numpy(draw.standard_normal((60, vocab), np.float32))
    wanted = logits.clone()
    for at, words in zip(places, bitmask, strict=True):
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab)
        wanted[at][torch.from_numpy(allowed == 0)] = NOTHING
    form.mask(logits, torch.tensor(places), torch.from_numpy(bitmask))
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [40, 700])
def test_masks_beside_the_logits_choose_what_masked_logits_would(form: SamplingOps, vocab: int, dtype: torch.dtype) -> None:
    """The second row has none. The last has a broken logit where its mask is shut, and the one before it allows nothing."""
    if not form.takes_masks:
        pytest.skip("this form wants masks in the logits")
    rows, draw = len(PARAMS) + 2, np.random.default_rng(0)
    logits = (torch.randn(rows, vocab) * 3).to(dtype)
    at, words = torch.tensor([0, *range(2, rows)]).flip(0), vocab // 32  # tokens behind the last word may not come either
    bitmask = torch.from_numpy(draw.integers(-(2**31), 2**31 - 1, (rows - 1, words), dtype=np.int32))
    bitmask[1] = 0
    bitmask[0, 0], logits[-1, 3] = 4 + 2, math.nan
    params, positions = [*PARAMS, {"temperature": 1.0}, {"temperature": 0.0}], list(range(rows))
    allowed = logits.float().clone()
    allowed[-1, 3] = 0.0
    form.mask(allowed, at, bitmask)
    expected = sample(form, allowed, params, positions, positions, True)[0].clone()
    assert expected[-2].tolist()[1:] == [0, 0, 1]
    expected[-1, Column.NANS] = 1
    expected[-2, Column.TOKEN] = 0
    found = sample(form, logits, params, positions, positions, False, masks=(at, bitmask))[0]
    assert torch.equal(found, expected)


def test_penalties_are_those_of_the_definition(form: SamplingOps) -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0, 3.0, -2.0]]).repeat(4, 1)
    table = torch.tensor([[1, 1, 4, 0, 0, 4, 9, 2], [5, 0, 4, 4, 1, 4, 3, 3], [0, 1, 2, 3, 4, 5, 0, 0]], dtype=torch.int32)
    at, rows = torch.tensor([3, 0, 1], dtype=torch.int32), torch.tensor([1, 0, 2], dtype=torch.int32)
    begins, ends = torch.tensor([2, 3, 6]).int(), torch.tensor([6, 7, 6]).int()
    penalties = torch.tensor([[1.3, 0.25, -0.5], [1.0, 0.5, 0.25], [0.7, 1.0, 1.0]])
    before = logits[0].tolist()
    form.penalise(logits, at, table, rows, begins, ends, penalties, 7)
    assert logits[2].tolist() == before
    for index, row, begin, end, (repetition, frequency, presence) in zip(
        at.tolist(), rows.tolist(), begins.tolist(), ends.tolist(), penalties.tolist(), strict=True
    ):
        known = [it for it in table[row, :end].tolist() if it < 6]
        output = [it for it in table[row, begin:end].tolist() if it < 6]
        wanted = []
        for token, x in enumerate(before):
            if token in known:
                x = x / repetition if x > 0 else x * repetition
            x -= frequency * output.count(token) + (presence if token in output else 0.0)
            wanted.append(x)
        assert logits[index].tolist() == pytest.approx(wanted, abs=1e-6)


def test_numbers_are_those_of_the_generator_for_any_seed_and_position() -> None:
    seeds, positions = [0, 1, -1, 2**63 - 1, 5 * 2**32 + 9], [0, 2**33 + 5, 2**31, 1, 2**40]
    found = uniform(torch.tensor(seeds), torch.tensor(positions), Purpose.SAMPLE)
    assert found.tolist() == [number(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert Purpose.SAMPLE == 0, "another number would change every seeded request's tokens"


def test_likely_tokens_beyond_the_candidates_stay_where_their_mass_asks_for_them() -> None:
    vocab = 3 * cpu.CANDIDATES
    flat = torch.zeros(2, vocab)
    top_k, top_p = torch.tensor([0, cpu.CANDIDATES + 40], dtype=torch.int32), torch.tensor([0.5, 1.0], dtype=torch.float64)
    left = cpu.apply_filters(flat, top_k, top_p)
    assert [row.isfinite().nonzero().squeeze(-1).tolist() for row in left] == [
        list(range(vocab // 2)),
        list(range(cpu.CANDIDATES + 40)),
    ]
