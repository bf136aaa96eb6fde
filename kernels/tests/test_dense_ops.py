"""The small operations against float64."""

import math

import pytest
import torch

from penstock.kernels.cpu import build
from penstock.kernels.ops import REFERENCE, ops_for
from penstock.kernels.prepare_kv.cache_rows import SCALED, from_rows, row_size
from penstock.kernels.prepare_kv.reference import QKNorm, Rotary
from penstock.kernels.rope.reference import rope

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def norm64(x, weight, eps):
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm(ops_in, dtype):
    ops = ops_in(dtype)
    x, residual, weight = torch.randn(5, 96).to(dtype) * 30, torch.randn(5, 96).to(dtype), torch.randn(96)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), norm64(x, weight, 1e-5), rtol=tolerance, atol=tolerance)
    out, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out.double(), norm64(total, weight, 1e-5), rtol=tolerance, atol=tolerance)


def test_rms_norm_of_zeros_is_zero(ops_in):
    assert torch.equal(ops_in(torch.float32).rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-6), torch.zeros(1, 8))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_mul(ops_in, dtype):
    x = (torch.randn(4, 74) * 30).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(ops_in(dtype).silu_mul(x).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_tanh_mul(ops_in, dtype):
    x = torch.cat((torch.randn(4, 74), torch.randn(4, 74) * 30, torch.full((1, 74), -1e30))).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(
        ops_in(dtype).gelu_tanh_mul(x).double(), expected, rtol=4 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_clamped_swiglu(ops_in, dtype):
    """Above the limit, below it, and far beyond what an exponential can hold."""
    x = torch.cat((torch.randn(4, 74) * 3, torch.full((1, 74), -1e30), torch.full((1, 74), 1e30))).to(dtype)
    gate, up = x.double().chunk(2, -1)
    gate = torch.where(gate > 2.5, 2.5, gate)
    expected = gate / (1 + torch.exp(-1.7 * gate)) * (1 + torch.minimum(torch.maximum(up, gate * 0 - 2.5), gate * 0 + 2.5))
    found = ops_in(dtype).clamped_swiglu(x, 1.7, 2.5)
    torch.testing.assert_close(found.double(), expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_gates_keep_what_is_not_a_number(ops_in):
    """A clamp that dropped it would hide a broken weight."""
    ops, broken = ops_in(torch.float32), torch.ones(2, 16)
    broken[0, 3] = broken[1, 11] = float("nan")
    for out in (ops.silu_mul(broken), ops.gelu_tanh_mul(broken), ops.clamped_swiglu(broken, 1.7, 0.5)):
        assert out.isnan().nonzero().tolist() == [[0, 3], [1, 3]]


def test_rope_rotates_each_pair_by_its_angle():
    """As complex numbers: first half real, second half imaginary."""
    x, angles = torch.randn(6, 3, 10), torch.randn(6, 5)
    out = rope(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :5].double(), x[..., 5:].double())
    expected = pairs * torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())[:, None]
    torch.testing.assert_close(out.double(), torch.cat((expected.real, expected.imag), -1), rtol=1e-5, atol=1e-5)


def test_rope_leaves_what_lies_beyond_the_angles():
    x, angles = torch.randn(6, 3, 16), torch.randn(6, 5)
    out = rope(x, angles.cos(), angles.sin())
    assert torch.equal(out[..., 10:], x[..., 10:])
    torch.testing.assert_close(out[..., :10], rope(x[..., :10].contiguous(), angles.cos(), angles.sin()))


@pytest.mark.parametrize("angles_a_head", [4, 3])
@pytest.mark.parametrize("normalised", [False, True])
def test_prepare_kv_writes_the_tokens_slots_and_no_other(ops_in, normalised, angles_a_head):
    ops = ops_in(torch.float32)
    q, k, v = (part.view(3, -1, 8) for part in torch.randn(3, 64).split([32, 16, 16], -1))
    cache = torch.full((5, 2, 2, 4, 8), math.pi)
    slots = torch.tensor([4 * 3 + 2, 4 * 1 + 0, 4 * 3 + 3])
    angles = torch.randn(3, angles_a_head)
    rotary = Rotary(angles.cos(), angles.sin())
    qk_norm = QKNorm(torch.randn(8), torch.randn(8), 1e-6) if normalised else None
    out = ops.prepare_kv(q, k, v, cache, slots, rotary, qk_norm)
    if qk_norm is not None:
        q, k = REFERENCE.rms_norm(q, qk_norm.q_weight, 1e-6), REFERENCE.rms_norm(k, qk_norm.k_weight, 1e-6)
    torch.testing.assert_close(out, rope(q, rotary.cos, rotary.sin), rtol=1e-5, atol=1e-6)
    expected = torch.full_like(cache, math.pi)
    for token, (block, offset) in enumerate([(3, 2), (1, 0), (3, 3)]):
        expected[block, 0, :, offset] = rope(k, rotary.cos, rotary.sin)[token]
        expected[block, 1, :, offset] = v[token]
    torch.testing.assert_close(cache, expected, rtol=1e-5, atol=1e-6)
    untouched = expected == math.pi
    assert torch.equal(cache[untouched], expected[untouched]) and torch.equal(cache[:, 1], expected[:, 1])


@pytest.mark.req("Q-17")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cached", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_scales_of_heads_divide_what_is_stored(ops_in, dtype, cached):
    """Each byte is that of the value divided by its head's scale in float32, and rounded once; what is beyond is cut."""
    ops, scales = ops_in(dtype), torch.tensor([[0.3, 7.0], [40.0, 1.0]])
    q, k, v = (part.view(3, -1, 40).to(dtype) for part in (300 * torch.randn(3, 320)).split([160, 80, 80], -1))
    cache, slots = torch.zeros(5, 2, 2, 4, 40, dtype=cached), torch.tensor([14, 4, 15])
    ops.prepare_kv(q, k, v, cache, slots, Rotary(torch.ones(3, 20), torch.zeros(3, 20)), None, scales)
    most = torch.finfo(cached).max
    for side, values in enumerate((k, v)):
        expected = (values.float() / scales[side, :, None]).clamp(-most, most).to(cached)
        assert torch.equal(cache[slots // 4, side, :, slots % 4].view(torch.uint8), expected.view(torch.uint8))


def test_scales_that_fit_no_cache_are_refused(native):
    cache, x = torch.zeros(2, 2, 2, 4, 8), torch.randn(1, 2, 8)
    rotary = Rotary(torch.ones(1, 4), torch.zeros(1, 4))
    with pytest.raises(TypeError, match=r"scales of torch.float32, \[2, 2\], do not fit a cache of torch.float32"):
        native(torch.float32).prepare_kv(x, x, x, cache, torch.tensor([4]), rotary, None, torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"scales of torch.float32, \[2, 1\], do not fit a cache of torch.float8_e4m3fn"):
        kept = cache.to(torch.float8_e4m3fn)
        native(torch.float32).prepare_kv(x, x, x, kept, torch.tensor([4]), rotary, None, torch.ones(2, 1))


@pytest.mark.parametrize(("dtype", "cached"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_cache_of_another_dtype_is_written_as_in_the_reference(native, dtype, cached):
    """Keys are rounded once, from float32; values as they are."""
    q, k, v = (part.view(3, -1, 40).to(dtype) for part in torch.randn(3, 320).split([160, 80, 80], -1))
    angles, norm = torch.randn(3, 16), QKNorm(torch.randn(40), torch.randn(40), 1e-6)
    rotary, slots = Rotary(angles.cos(), angles.sin()), torch.tensor([14, 4, 15])
    found, expected = (torch.full((5, 2, 2, 4, 40), math.pi, dtype=cached) for _ in range(2))
    out = native(dtype).prepare_kv(q, k, v, found, slots, rotary, norm)
    wanted = REFERENCE.prepare_kv(q.float(), k.float(), v, expected, slots, rotary, norm)
    torch.testing.assert_close(out.float(), wanted, rtol=2 * TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(found[:, 1], expected[:, 1])
    torch.testing.assert_close(found, expected, rtol=2 * TOLERANCE[cached], atol=TOLERANCE[cached])


@pytest.mark.req("Q-06")
@pytest.mark.parametrize(("kept", "greatest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_cache_of_eight_bits_is_rounded_as_by_torch_and_saturates(native, dtype, kept, greatest):
    """Every code, all middles between two, numbers beyond the greatest, tails of vectors, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(kept).float()
    codes = codes[codes.isfinite()].sort().values.unique()
    assert codes[-1] == greatest
    middles = (codes[1:] + codes[:-1]) / 2
    beyond = torch.tensor([1e9, -1e9, greatest * 1.002, -greatest * 1.2, float("inf"), 1e-9, float("nan")])
    numbers = torch.cat((codes, middles, middles * 1.01, middles * 0.99, beyond))
    numbers = torch.cat((numbers, torch.randn(-len(numbers) % 37) * 10)).to(dtype).view(-1, 1, 37)
    rotary, slots = Rotary(torch.ones(len(numbers), 4), torch.zeros(len(numbers), 4)), torch.arange(len(numbers)) + 8
    found, expected = (torch.zeros(-(-len(numbers) // 8) + 1, 2, 1, 8, 37, dtype=kept) for _ in range(2))
    native(dtype).prepare_kv(numbers[..., :37], numbers, numbers, found, slots, rotary, None)
    REFERENCE.prepare_kv(numbers[..., :37], numbers, numbers, expected, slots, rotary, None)
    placed = found[1:, 1].transpose(1, 2).reshape(-1, 37)[: len(numbers)].float()
    wanted = numbers[:, 0].float().clamp(-greatest, greatest).to(kept).float()
    assert torch.equal(placed.nan_to_num(777.0), wanted.nan_to_num(777.0))
    assert torch.equal(found.float().nan_to_num(777.0), expected.float().nan_to_num(777.0)), "keys take the same way"
    assert placed[placed.isfinite()].abs().max() == greatest and not placed.isinf().any()
    # Next to 1, codes are 2^-3 or 2^-2 apart: the one format is finer, the other goes further.
    apart = (codes[codes > 1].min() - 1).item()
    assert apart == {448.0: 2**-3, 57344.0: 2**-2}[greatest]
    ordinary = (wanted.abs() >= 2**-6) & (wanted.abs() < greatest)
    errors = ((wanted - numbers[:, 0].float()) / wanted)[ordinary].abs()
    assert apart / 4 < errors.max() <= apart / 2 + 2**-7


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_cache_of_int8_is_rounded_by_row_as_in_the_reference(native, dtype):
    """Bit by bit: rows of all magnitudes, of zeros, with ties, and with numbers that are not finite, which stay so."""
    torch.manual_seed(1)
    numbers = torch.randn(11, 2, 37) * 10 ** torch.linspace(-38, 30, 22).view(11, 2, 1)
    numbers[3, 0], numbers[4, 1, :] = 0.0, torch.arange(37) / 2
    numbers[4, 1, 36] = 127.0
    numbers[5, 0, 36], numbers[6, 1, 3] = float("nan"), -float("inf")
    numbers = numbers.to(dtype)
    rotary, slots = Rotary(torch.ones(11, 4), torch.zeros(11, 4)), torch.arange(11) + 5
    found, expected = (torch.zeros(4, 2, 2, 5, row_size(37, SCALED), dtype=SCALED) for _ in range(2))
    native(dtype).prepare_kv(numbers, numbers, numbers, found, slots, rotary, None)
    REFERENCE.prepare_kv(numbers, numbers, numbers, expected, slots, rotary, None)
    read, wanted = from_rows(found, 37), from_rows(expected, 37)
    assert torch.equal(read.nan_to_num(7.0), wanted.nan_to_num(7.0)) and read.isnan().any((-1, -2)).sum() == 2 * 2
    tokens = read[1:, 1].transpose(1, 2).flatten(0, 1)[:11]
    assert torch.equal(tokens[4, 1, :5], torch.tensor([0.0, 0.0, 1.0, 2.0, 2.0])), "half to even"
    rows = torch.tensor([0, 1, 2, 7, 8, 9, 10])
    scale = numbers[rows].float().abs().amax(-1, keepdim=True) / 127
    assert ((tokens[rows] - numbers[rows].float()).abs() <= scale.clamp(min=torch.finfo(torch.float32).tiny) * 0.5001).all()
    with pytest.raises(ValueError, match="a cache with rows of 41 meets heads of 36"):
        native(dtype).prepare_kv(*[numbers[..., :36].contiguous()] * 3, found, slots, rotary, None)


def test_a_cache_that_nothing_reads_is_refused(native):
    x = torch.zeros(1, 2, 8)
    rotary, cache = Rotary(torch.ones(1, 4), torch.zeros(1, 4)), torch.zeros(2, 2, 2, 4, 8, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"a cache of torch\.float16 has no compiled form for torch\.float32"):
        native(torch.float32).prepare_kv(x, x, x, cache, torch.tensor([4]), rotary, None)


def test_there_are_no_kernels_for_other_devices():
    with pytest.raises(ValueError, match="'tpu'"):
        ops_for("tpu", torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_native_bits_do_not_depend_on_the_rows_place(native, dtype):
    """The rows' addresses are aligned differently, and neighbours come and go."""
    ops, x, weight = native(dtype), torch.randn(9, 74).to(dtype), torch.randn(37)
    norms, gates, geglu = ops.rms_norm(x.view(18, 37), weight, 1e-5), ops.silu_mul(x), ops.gelu_tanh_mul(x)
    clamped = ops.clamped_swiglu(x, 1.7, 0.8)
    for first in range(8):
        assert torch.equal(ops.rms_norm(x.view(18, 37)[first : first + 1], weight, 1e-5), norms[first : first + 1])
        assert torch.equal(ops.silu_mul(x[first : first + 2]), gates[first : first + 2])
        assert torch.equal(ops.gelu_tanh_mul(x[first : first + 2]), geglu[first : first + 2])
        assert torch.equal(ops.clamped_swiglu(x[first : first + 2], 1.7, 0.8), clamped[first : first + 2])


def test_native_refuses_another_dtype(native):
    with pytest.raises(TypeError, match=r"for torch\.float32, not torch\.bfloat16"):
        native(torch.float32).silu_mul(torch.zeros(1, 4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"a norm is float32 .* not torch\.bfloat16"):
        native(torch.float32).rms_norm(torch.zeros(1, 4), torch.ones(4, dtype=torch.bfloat16), 1e-6)


@pytest.mark.req("ATT-29")
def test_says_why_the_reference_runs(monkeypatch, caplog):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert ops_for("cpu", torch.float32) is REFERENCE
    assert "no C++ compiler (no-such-compiler)" in caplog.text
    assert ops_for("cpu", torch.float16) is REFERENCE
