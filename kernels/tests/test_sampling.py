"""Sampling's Triton kernels against their torch reference, interpreted here and compiled on a GPU."""

import pytest
import torch

from penstock.kernels.sampling import device as device_parts
from penstock.kernels.sampling import reference, scan, triton
from penstock.kernels.sampling.buffers import CHUNK, RESULT, Column, Path, SamplingBuffers
from penstock.kernels.sampling.params import pack

pytestmark = pytest.mark.slow

# Probabilities that are no ratios of small numbers: of equal tokens, rounding would decide which is the last.
FILTERS = {
    "greedy": {"temperature": 0.0},
    "all": {},
    "hot": {"temperature": 3.7},
    "k": {"top_k": 5},
    "k-one": {"top_k": 1},
    "k-many": {"top_k": 90, "temperature": 0.7},
    "k-more-than-there-are": {"top_k": 100_000},
    "p": {"top_p": 0.9017},
    "p-little": {"top_p": 1e-9},
    "p-much": {"top_p": 0.99871, "temperature": 2.0},
    "min-p": {"min_p": 0.0501},
    "min-p-little": {"min_p": 1e-6, "temperature": 1.5},
    "all-three": {"min_p": 0.003, "top_k": 30, "top_p": 0.8713},
    "p-of-many-k": {"top_k": 100, "top_p": 0.9571, "temperature": 1.9},
    "p-of-min-p": {"min_p": 1e-5, "top_p": 0.9871},
}


def words(**params) -> list[int]:
    """A row of parameters."""
    return pack(**{"seed": 7, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}).tolist()


def both(logits, params, positions, device, candidates=64, path=Path.FILTERED, masked=False):
    """(result, threshold, last_id) of the reference and of the kernels."""
    table = torch.tensor(params, dtype=torch.int32)
    rows, positions = torch.arange(len(logits), dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
    out = []
    for form, at in ((reference, "cpu"), (triton, device)):
        # What a kernel does not write shows.
        buffers = SamplingBuffers.allocate(len(logits), logits.shape[1], torch.device(at), candidates)
        buffers.result.fill_(-7)
        result = form.sample(logits.to(at), rows.to(at), positions.to(at), table.to(at), buffers, path, masked)
        assert result.shape == (len(logits), RESULT)
        out.append((result.cpu(), buffers.threshold.cpu(), buffers.last_id.cpu()))
    return out


@pytest.mark.req("SMP-08", "SMP-09", "SMP-10")
@pytest.mark.parametrize(
    ("vocab", "dtype", "shape", "candidates"),
    [
        (131, torch.float32, "spread", 64),
        (131, torch.float32, "ties", 4),
        (1000, torch.bfloat16, "flat", 64),
        (700, torch.bfloat16, "ties", 4),
        (7, torch.float32, "peak", 4),
        pytest.param(151_936, torch.bfloat16, "spread", 64, marks=pytest.mark.gpu),
        pytest.param(151_936, torch.float32, "flat", 64, marks=pytest.mark.gpu),
        pytest.param(128_256, torch.bfloat16, "ties", 64, marks=pytest.mark.gpu),
        pytest.param(262_144, torch.float32, "peak", 64, marks=pytest.mark.gpu),
    ],
)
def test_tokens_and_what_filters_leave_equal_the_reference(triton_device, vocab, dtype, shape, candidates):
    # In a vocabulary of thousands, float32 sums may end a nucleus, or a draw, one token apart.
    compare(triton_device, vocab, dtype, shape, list(FILTERS), candidates, allowed=0 if vocab < 10_000 else 2)


@pytest.mark.req("SMP-08", "SMP-09", "SMP-10")
@pytest.mark.parametrize(
    ("vocab", "dtype", "shape", "names"),
    [
        (20_000, torch.bfloat16, "spread", ["k", "p", "p-much", "min-p", "all-three"]),
        (128_256, torch.bfloat16, "ties", ["greedy", "all", "k-more-than-there-are", "p", "p-of-min-p"]),
        (151_936, torch.bfloat16, "spread", ["hot", "k-many", "p", "min-p-little"]),
        (151_936, torch.float32, "flat", ["k-many", "p-much", "all-three"]),
    ],
)
def test_tiles_of_real_vocabularies_equal_the_reference(triton_device, vocab, dtype, shape, names):
    """The tiles, chunks and warps of production, for few rows: of 512, 2,048 and 4,096 tokens."""
    compare(triton_device, vocab, dtype, shape, names)


def compare(device, vocab, dtype, shape, names, candidates=64, allowed=0):
    """Draws a row with each of the filters; so many may differ from the reference."""
    torch.manual_seed(vocab)
    logits = torch.randn(len(names), vocab) * {"spread": 3.0, "flat": 0.1, "ties": 2.0, "peak": 1.0}[shape]
    if shape == "ties":
        logits = logits.round()
    if shape == "peak":
        logits[:, 3] += 30
    positions = [100 + 17 * row for row in range(len(names))]
    expected, found = both(logits.to(dtype), [words(**FILTERS[name]) for name in names], positions, device, candidates)
    for what, here, there in zip(("result", "threshold", "last id"), expected, found, strict=True):
        wrong = [n for n, row in zip(names, range(len(here)), strict=True) if not close(here[row], there[row])]
        assert len(wrong) <= allowed, (what, wrong, here, there)


def close(here, there) -> bool:
    """Whether two rows of a result are the same but for rounding."""
    return torch.allclose(here.double(), there.double(), rtol=1e-6)


def scanned(logits, device) -> SamplingBuffers:
    """What a scan of rows with filters leaves."""
    buffers = SamplingBuffers.allocate(*logits.shape, torch.device(device))
    rows = torch.arange(len(logits), dtype=torch.int32, device=device)
    table = torch.tensor([words(top_k=5)] * len(logits), dtype=torch.int32).to(device)
    triton.scan(logits.to(device), rows, table, buffers, Path.FILTERED, masked=True)
    return buffers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tile_finds_its_likeliest_tokens_in_few_looks(monkeypatch, interpreted, dtype):
    """A look goes through the registers of a whole tile. To bisect between the bounds of all numbers takes 16."""
    looks, middle = [], device_parts.middle
    monkeypatch.setattr(scan, "middle", lambda low, high: looks.append(low) or middle(low, high))
    buffers = scanned((3 * torch.randn(1, 151_936)).to(dtype), "cpu")
    assert 4 < len(looks) / buffers.tile_max.shape[1] <= 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_chosen_from_its_candidates_in_few_looks(monkeypatch, interpreted, dtype):
    """Two limits, the last of equals at each, and a token. To bisect over all bits of a float32, and over all ids, takes 82."""
    torch.manual_seed(0)
    looks, middle = [], device_parts.middle
    logits, table = (3 * torch.randn(1, 151_936)).to(dtype), torch.tensor([words(top_k=50, top_p=0.9017)], dtype=torch.int32)
    monkeypatch.setattr(device_parts, "middle", lambda low, high: looks.append(low) or middle(low, high))
    row, buffers = torch.zeros(1, dtype=torch.int32), SamplingBuffers.allocate(1, 151_936, torch.device("cpu"))
    triton.sample(logits, row, row, table, buffers, Path.FILTERED)
    assert 4 < len(looks) <= 70


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiles_hand_on_the_likeliest_of_equals_negatives_and_masked_ones(triton_device, dtype):
    """What a tile keeps, and the greatest that it keeps back; the last of two tiles is not full."""
    vocab, nothing = 230, float("-inf")
    logits = torch.randn(5, vocab).to(dtype)
    logits[1] = -logits[1].abs() - 1
    logits[2] = logits[2].round()
    logits[3] = -2.5
    logits[4, torch.randperm(vocab)[40:]] = nothing
    buffers = scanned(logits, triton_device)
    for row in range(5):
        for tile, ids in enumerate(torch.arange(vocab).split(CHUNK)):
            values, order = logits[row, ids].float().sort(descending=True, stable=True)
            kept = zip(buffers.candidate_ids[row, tile].tolist(), buffers.candidates[row, tile].tolist(), strict=True)
            assert dict(kept) == dict(zip(ids[order[:64]].tolist(), values[:64].tolist(), strict=True))
            assert buffers.tile_cut[row, tile] == values[64]


def test_rows_whose_filters_leave_more_than_the_candidates_are_looked_at_again(triton_device):
    logits = torch.randn(3, 300)
    params = torch.tensor([words(top_k=100), words(top_k=4, top_p=0.9), words(top_p=0.99)], dtype=torch.int32).to(triton_device)
    rows = torch.arange(3, dtype=torch.int32, device=triton_device)
    buffers = SamplingBuffers.allocate(3, 300, torch.device(triton_device), candidates=4)
    triton.sample(logits.to(triton_device), rows, rows, params, buffers, Path.FILTERED)
    assert buffers.wide.tolist() == [1, 0, 1]


@pytest.mark.req("SMP-09")
@pytest.mark.parametrize("candidates", [4, 64], ids=["more than the candidates", "candidates alone"])
def test_a_top_p_that_ends_exactly_at_a_token_keeps_no_token_more(triton_device, candidates):
    """Eight equally likely tokens: p of n/8 is reached by n of them, the smallest ids."""
    logits = torch.full((7, 300), float("-inf"))
    logits[:, 20:28] = 1.5
    params = [words(top_p=count / 8) for count in range(1, 8)]
    for _, threshold, last_id in both(logits, params, [3] * 7, triton_device, candidates, masked=True):
        assert threshold.tolist() == [1.5] * 7
        assert last_id.tolist() == [19 + count for count in range(1, 8)]


def test_a_row_s_token_does_not_depend_on_the_others(triton_device):
    logits, positions = torch.randn(4, 200), [5, 6, 7, 8]
    params = [words(top_p=0.8), words(temperature=0.0), words(), words(top_k=70)]
    _, (together, _, _) = both(logits, params, positions, triton_device, candidates=8)
    for row in range(4):
        alone = slice(row, row + 1)
        _, (result, _, _) = both(logits[alone], params[alone], positions[alone], triton_device, candidates=8)
        assert torch.equal(result[0], together[row])


@pytest.mark.req("SMP-04")
@pytest.mark.parametrize("path", [Path.GREEDY, Path.RANDOM])
def test_a_lesser_path_serves_what_asks_for_no_more(triton_device, path):
    logits = torch.randn(3, 200).round()
    logits[0, :2] = 9.0
    params = [words(temperature=0.0), *([words(temperature=0.0), words()] if path is Path.GREEDY else [words(), words(seed=3)])]
    expected, found = both(logits, params, [3, 4, 5], triton_device, path=path)
    rows = slice(0, 2 if path is Path.GREEDY else 3)
    assert expected[0][0, Column.TOKEN] == 0
    assert torch.equal(found[0][rows], expected[0][rows])


def test_broken_and_masked_logits_are_counted_and_never_chosen(triton_device):
    nothing, logits = float("-inf"), torch.randn(6, 140)
    for row in (0, 3):
        logits[row, :2], logits[row, 9], logits[row, 139] = float("nan"), float("inf"), nothing
        logits[row + 1] = nothing
        logits[row + 2, :139] = nothing
    params = [words(temperature=0.0)] * 3 + [words(top_k=3)] * 3
    for masked in (False, True):
        expected, found = both(logits, params, [1] * 6, triton_device, masked=masked)
        assert torch.equal(found[0][:, Column.NANS :], expected[0][:, Column.NANS :])
        assert ((found[0][:, Column.TOKEN] >= 0) & (found[0][:, Column.TOKEN] < 140)).all()
        assert found[0][[2, 5], Column.TOKEN].tolist() == [139, 139]
        # The chosen are always finite.
        assert logits[0, found[0][0, Column.TOKEN]].isfinite()
        assert logits[3, found[0][3, Column.TOKEN]].isfinite()


DRAWS = 20_000


@pytest.mark.req("SMP-10", "SMP-12", "SMP-13")
@pytest.mark.parametrize("params", [{}, {"top_p": 0.8013, "temperature": 1.3}, {"top_k": 6}])
@pytest.mark.parametrize("number", [12, pytest.param(DRAWS, marks=pytest.mark.gpu)])
def test_draws_have_the_distribution_of_what_is_left(triton_device, params, number):
    torch.manual_seed(3)
    logits = (torch.randn(10) * 2).expand(DRAWS, -1).contiguous()
    # Seeds follow one another, as those of `n` choices do.
    rows = [words(**{**params, "seed": seed}) for seed in range(DRAWS)]
    positions = [9] * DRAWS
    _, (found, _, _) = both(logits[:number], rows[:number], positions[:number], triton_device)
    ids = torch.arange(DRAWS, dtype=torch.int32)
    buffers = SamplingBuffers.allocate(DRAWS, 10, torch.device("cpu"))
    table = torch.tensor(rows, dtype=torch.int32)
    drawn = reference.sample(logits, ids, torch.full_like(ids, 9), table, buffers, Path.FILTERED)[:, Column.TOKEN]
    # Kernels and reference draw the same tokens from the same numbers; and these follow the probabilities.
    assert (found[:, Column.TOKEN] != drawn[:number]).float().mean() < 1e-3
    counts = torch.bincount(drawn, minlength=10).double()
    ordered, order = (logits[0].double() / params.get("temperature", 1.0)).softmax(0).sort(descending=True)
    keep = (ordered.cumsum(0) - ordered < params.get("top_p", 1.0)) & (torch.arange(10) < params.get("top_k", 10))
    due = torch.zeros_like(counts).index_put((order[keep],), ordered[keep] * DRAWS / ordered[keep].sum())
    assert not counts[due == 0].any()
    statistic, degrees = float(((counts - due)[due > 5] ** 2 / due[due > 5]).sum()), int((due > 5).sum()) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5
