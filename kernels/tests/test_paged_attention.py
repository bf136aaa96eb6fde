"""Paged attention against dense attention in float64, and against itself in other batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.ops import Ops
from penstock.kernels.paged_attention.batch import PagedBatch
from penstock.kernels.paged_attention.launch import AttentionShape, Launch, attention_steps, fast_launches
from penstock.kernels.prepare_kv.cache_rows import SCALED, row_size
from penstock.kernels.prepare_kv.reference import Rotary

shapes = st.sampled_from([(1, 1, 64), (2, 1, 32), (7, 1, 80), (2, 4, 96), (3, 2, 128)])
"""Queries a key head, key heads, head size."""
requests = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 1, 2, 5, 17, 130])), min_size=1, max_size=5)
"""Computed tokens and new tokens of each."""


windows = st.none() | st.sampled_from([1, 2, 15, 64, 100, 128, 400])


class Case:
    """Requests with random queries, keys and values in random blocks of a cache that is NaN elsewhere: also in blocks that lie
    outside the window of a request's first query."""

    def __init__(self, shape, lengths, block_size, seed, window=None, softcap=0.0, has_sinks=False, two_way=False) -> None:
        self.softcap = softcap
        self.group, self.kv_heads, self.head_size = shape
        self.lengths, self.block_size, self.window = lengths, block_size, window
        self.rng = np.random.default_rng(seed)
        self.keys, self.values = ([self._random(a + b, self.kv_heads) for a, b in lengths] for _ in range(2))
        self.queries = [self._random(new, self.group * self.kv_heads) for _, new in lengths]
        self.sinks = self._random(1, self.group * self.kv_heads)[0, :, 0].mul(3).contiguous() if has_sinks else None
        self.ends = [self._ends(computed, new) for computed, new in lengths] if two_way else None

    def _ends(self, computed: int, new: int) -> np.ndarray:
        """Some neighbours among the new tokens see each other."""
        ends = np.arange(computed + 1, computed + new + 1, dtype=np.int32)
        first, last = sorted(self.rng.integers(0, new + 1, 2))
        ends[first:last] = computed + last
        return ends

    def _random(self, length: int, heads: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal((length, heads, self.head_size), np.float32))

    def run(self, ops: Ops, chosen: list[int], skip: int = 0) -> list[torch.Tensor]:
        """Results of the chosen requests in one batch; `skip` of each request's queries (not its last) came in an earlier one."""
        tables, parts, lens = [], [], []
        num_blocks = sum(-(-sum(self.lengths[i]) // self.block_size) for i in chosen) + 2
        # A layer's strided view of pages that hold two.
        pages = torch.full(
            (num_blocks, 2, 2, self.kv_heads, self.block_size, self.head_size), float("nan"), dtype=self.keys[0].dtype
        )
        cache = pages[:, 1]
        free = list(self.rng.permutation(np.arange(1, num_blocks)))
        for i in chosen:
            length, part = sum(self.lengths[i]), self.queries[i][min(skip, self.lengths[i][1] - 1) :]
            first = 0 if self.window is None else max(0, length - len(part) - self.window + 1)
            table = [int(free.pop()) for _ in range(-(-length // self.block_size))]
            for position in range(first, length):
                block, offset = table[position // self.block_size], position % self.block_size
                cache[block, 0, :, offset], cache[block, 1, :, offset] = self.keys[i][position], self.values[i][position]
            tables.append([0] * (first // self.block_size) + table[first // self.block_size :])
            parts.append(part)
            lens.append(length)
        block_table = np.zeros((len(chosen), max(map(len, tables))), np.int32)
        for row, table in enumerate(tables):
            block_table[row, : len(table)] = table
        starts = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int32)
        ends = (
            None if self.ends is None else np.concatenate([self.ends[i][-len(q) :] for i, q in zip(chosen, parts, strict=True)])
        )
        batch = PagedBatch(self.block_size, starts, np.array(lens, np.int32), block_table, self.window, ends)
        out = ops.paged_attention(torch.cat(parts), cache, batch, self.head_size**-0.5, self.softcap, self.sinks)
        return list(out.split([len(part) for part in parts]))

    def dense(self, i: int) -> torch.Tensor:
        computed, new = self.lengths[i]
        repeat = (x.double().repeat_interleave(self.group, 1) for x in (self.keys[i], self.values[i]))
        keys, values = repeat
        scores = torch.einsum("qhd,khd->hqk", self.queries[i].double(), keys) * self.head_size**-0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        keys_at = torch.arange(computed + new)
        back = torch.arange(computed, computed + new)[:, None] - keys_at
        unseen = (back < 0) if self.ends is None else keys_at >= torch.from_numpy(self.ends[i])[:, None]
        unseen |= back >= (self.window or computed + new)
        scores = scores.masked_fill(unseen, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, new, 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : computed + new], values)


softcaps = st.sampled_from([0.0, 0.7, 50.0])
block_sizes = st.sampled_from([8, 16, 32, 256])
cases = st.builds(Case, shapes, requests, block_sizes, st.integers(0, 2**32), windows, softcaps, st.booleans(), st.booleans())


@pytest.mark.req("ATT-06", "ATT-07", "ATT-08", "ATT-29")
@settings(max_examples=40)
@given(cases)
def test_equals_dense_attention(ops_in, case):
    for i, out in enumerate(case.run(ops_in(torch.float32), list(range(len(case.lengths))))):
        torch.testing.assert_close(out.double(), case.dense(i), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=40)
@given(cases, st.integers(0, 4), st.integers(0, 130))
def test_bits_depend_on_the_request_alone(ops_in, case, which, skip):
    """In a crowd in any order, alone, and with a part of the queries in an earlier batch."""
    which %= len(case.lengths)
    ops = ops_in(torch.float32)
    order = case.rng.permutation(len(case.lengths)).tolist()
    crowd = case.run(ops, order)[order.index(which)]
    (alone,) = case.run(ops, [which])
    (later,) = case.run(ops, [which], skip=skip)
    assert torch.equal(crowd, alone)
    assert torch.equal(alone[-len(later) :], later)


def test_a_query_sees_keys_after_its_own_as_far_as_it_is_told(ops_in):
    case = Case((2, 2, 64), [(200, 150), (0, 17)], 16, 5, window=100, two_way=True)
    case.ends = [np.full(150, 350, np.int32), np.arange(1, 18, dtype=np.int32)]
    causal = Case((2, 2, 64), [(200, 150), (0, 17)], 16, 5, window=100)
    seen, unseen = (one.run(ops_in(torch.float32), [0, 1]) for one in (case, causal))
    torch.testing.assert_close(seen[0].double(), case.dense(0), rtol=1e-4, atol=1e-5)
    assert (seen[0][:-1] - unseen[0][:-1]).abs().amax((1, 2)).min() > 1e-4
    assert torch.equal(seen[0][-1], unseen[0][-1])
    assert torch.equal(seen[1], unseen[1])


def test_a_sink_takes_its_share_of_the_weights(ops_in):
    """Of two equal scores each has half: the value counts half, since the sink has none. A great sink leaves nothing."""
    case = Case((1, 2, 64), [(0, 1)], 16, 0, has_sinks=True)
    score = (case.queries[0][0, 0] @ case.keys[0][0, 0]) * 64**-0.5
    case.sinks = torch.tensor([score, score + 100.0])
    (out,) = case.run(ops_in(torch.float32), [0])
    torch.testing.assert_close(out[0, 0], case.values[0][0, 0] / 2)
    assert out[0, 1].abs().max() < 1e-6


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_another_dtype_is_read_as_it_is(ops_in, dtype, cached):
    case = Case((2, 2, 72), [(40, 3), (300, 1), (0, 37)], 16, 0)
    case.queries = [x.to(dtype) for x in case.queries]
    case.keys, case.values = ([x.to(cached) for x in part] for part in (case.keys, case.values))
    for i, out in enumerate(case.run(ops_in(dtype), [0, 1, 2])):
        assert out.dtype == dtype
        loose = dtype is torch.bfloat16
        torch.testing.assert_close(out.double(), case.dense(i), rtol=2**-8 if loose else 1e-4, atol=1e-3 if loose else 1e-5)


@pytest.mark.parametrize("value_size", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_int8_have_a_scale_of_their_own(ops_in, dtype, value_size):
    """Tokens and heads whose magnitudes differ by thousands, written and read: against float64, to what each row rounds."""
    torch.manual_seed(0)
    heads, size, n = (1 if value_size else 2), 45, 21
    sizes = 10 ** torch.linspace(-3, 1, n * heads).view(n, heads, 1)
    k, v = torch.randn(n, heads, size), torch.randn(n, heads, size) * sizes
    k, v, q = k.to(dtype), v.to(dtype), (torch.randn(n, 2 * heads, size)).to(dtype)
    v = k if value_size else v
    cache = torch.full((4, 2 - bool(value_size), heads, 16, row_size(size, SCALED)), 77, dtype=SCALED)
    slots = torch.tensor([(3 if at < 16 else 1) * 16 + at % 16 for at in range(n)])
    rotary = Rotary(torch.ones(n, 4), torch.zeros(n, 4))
    ops = ops_in(dtype)
    queries = ops.prepare_kv(q, k, None if value_size else v, cache, slots, rotary, None)
    assert (cache[[0, 2]] == 77).all()
    batch = PagedBatch(16, np.array([0, n], np.int32), np.array([n], np.int32), np.array([[3, 1]], np.int32))
    found = ops.paged_attention(queries, cache, batch, 0.2, value_size=value_size)

    def rounded(x):
        scale = x.double().abs().amax(-1, keepdim=True) / 127
        return (x.double() / scale).round() * scale

    keys, values = rounded(k), rounded(v)[..., -value_size:]
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys.repeat_interleave(2, 1)) * 0.2
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(2, 1))
    loose = dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8 if loose else 1e-4, atol=1e-3 if loose else 1e-5)


def test_bfloat16_is_rounded_once(ops_in):
    case = Case((2, 2, 64), [(40, 3)], 16, 0)
    for name in ("queries", "keys", "values"):
        setattr(case, name, [x.bfloat16() for x in getattr(case, name)])
    (out,) = case.run(ops_in(torch.bfloat16), [0])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), case.dense(0), rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (16, 8, 128), (8, 1, 256), (14, 2, 128), (16, 4, 256), (40, 8, 128), (16, 16, 64)]
)
@pytest.mark.parametrize("most", [1, 7, 256, 1000])
def test_the_warm_ups_steps_launch_what_any_step_launches(heads: tuple[int, int, int], most: int) -> None:
    shape, keys = AttentionShape(*heads, 2), 40960

    def variants(requests: int, longest: int, tokens: int) -> set[Launch]:
        found = fast_launches(shape, requests, longest, keys, tokens)
        return {replace(launch, splits=min(launch.splits, 2), least_tiles=1) for launch in found}

    warm = {it for step in attention_steps(most, 2048, keys) for it in variants(len(step), max(step), sum(step))}
    some = {*range(1, min(most, 64) + 1), *range(65, most + 1, 31), most}
    longest = (*range(1, 20), 32, 33, 64, 65, 99, 2048)
    steps = [(n, queries, tokens) for n in some for queries in longest for tokens in (n, 700, 2048)]
    assert warm == {it for step in steps if step[2] >= max(step[:2]) for it in variants(*step)}


def test_the_warm_ups_steps_fit_an_engines_limits() -> None:
    steps = list(attention_steps(max_num_requests=16, max_num_tokens=6, max_query_len=4))
    assert [1] * 5 in steps and [4] in steps
    assert all(sum(step) <= 6 and max(step) <= 4 for step in steps)
