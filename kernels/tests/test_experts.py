"""Routing and the experts of each token: against float64, against rules written out, and against themselves in other batches."""

import pytest
import torch

from penstock.kernels.cpu.tape import Pool
from penstock.kernels.experts.reference import experts, experts_on_device
from penstock.kernels.experts.routing import Routing, route
from penstock.kernels.experts.table import ExpertTable, PackedExpertTable, PackedLayer, alike
from penstock.kernels.gated_mul.reference import clamped_swiglu, silu_mul
from penstock.kernels.integer_linear.reference import pack_integers
from penstock.kernels.linear.reference import pack_weight
from penstock.kernels.quantized_linear.reference import pack_quantized, pair_up
from penstock.kernels.quantized_linear.rounding import Rounding

HIDDEN, INNER, EXPERTS = 70, 42, 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
RULES = [
    Routing(2),
    Routing(3, renormalise=True),
    Routing(3, sigmoid=True, renormalise=True, scale=2.5, groups=4, top_groups=2, group_best=2),
    Routing(2, groups=4, top_groups=1),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


class Layer:
    """Random experts, as every form has them: plain, or with biases and a clamped gate."""

    def __init__(self, dtype: torch.dtype, clamp: tuple[float, float] | None = None) -> None:
        self.gate_up = [(torch.randn(2 * INNER, HIDDEN) / 8).to(dtype) for _ in range(EXPERTS)]
        self.down = [(torch.randn(HIDDEN, INNER) / 8).to(dtype) for _ in range(EXPERTS)]
        sizes = (2 * INNER, HIDDEN)
        self.clamp, self.biases = clamp, [[torch.zeros(size, dtype=dtype)] * EXPERTS for size in sizes]
        packed = [[pack_weight(weight) for weight in weights] for weights in (self.gate_up, self.down)]
        if clamp is None:
            self.table = ExpertTable(*packed, HIDDEN, INNER, "silu")
        else:
            self.biases = [[torch.randn(size).to(dtype) for _ in range(EXPERTS)] for size in sizes]
            self.table = ExpertTable(*packed, HIDDEN, INNER, "clamped_swiglu", clamp, (self.biases[0], self.biases[1]))

    def mlp(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        biases = [bias[expert].to(x.dtype) for bias in self.biases]
        projected = x @ self.gate_up[expert].to(x.dtype).T + biases[0]
        gated = silu_mul(projected) if self.clamp is None else clamped_swiglu(projected, *self.clamp)
        return gated @ self.down[expert].to(x.dtype).T + biases[1]

    def mlps(self):
        return [lambda x, expert=expert: self.mlp(expert, x) for expert in range(EXPERTS)]

    def expected(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, (chosen, counts) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
            for expert, weight in zip(chosen, counts, strict=True):
                gate, up = (x[token].double() @ self.gate_up[expert].double().T + self.biases[0][expert].double()).chunk(2)
                slope = 1.0
                if self.clamp is not None:
                    slope, limit = self.clamp
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
                product = (gate * (slope * gate).sigmoid() * up) @ self.down[expert].double().T
                out[token] += weight * (product + self.biases[1][expert].double())
        return out


def choices(tokens: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(EXPERTS)[:k] for _ in range(tokens)]) if tokens else torch.empty(0, k)
    return ids.int(), torch.rand(tokens, k)


@pytest.fixture
def forms(native, dtype):
    """`forms(layer)`: each form over a layer's weights, the compiled one first."""

    def of(layer: Layer):
        fused = native(dtype).experts
        yield lambda x, ids, weights: fused(x, ids, weights, layer.table)
        yield lambda x, ids, weights: experts(x, ids, weights, layer.mlps())
        yield lambda x, ids, weights: experts_on_device(x, ids, weights, layer.mlps())

    return of


@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
@pytest.mark.parametrize("k", [1, 3, EXPERTS])
@pytest.mark.parametrize("clamp", [None, (1.7, 0.6)], ids=["plain", "clamped-biased"])
def test_experts_equal_float64(forms, dtype, tokens, k, clamp):
    layer, x = Layer(dtype, clamp), torch.randn(tokens, HIDDEN).to(dtype)
    ids, weights = choices(tokens, k)
    for form in forms(layer):
        out = form(x, ids, weights)
        assert out.dtype is dtype and out.shape == x.shape
        torch.testing.assert_close(out.double(), layer.expected(x, ids, weights), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_one_expert_may_get_all_tokens_and_the_others_are_not_multiplied(native, dtype):
    layer, x = Layer(dtype), torch.randn(20, HIDDEN).to(dtype)
    ids, weights = torch.full((20, 1), 3, dtype=torch.int32), torch.rand(20, 1)
    expected = layer.expected(x, ids, weights)
    for expert in (0, 1, 2, 4):
        layer.table.gate_up_at[expert] = layer.table.down_at[expert] = 0  # to read from there ends the process
    out = native(dtype).experts(x, ids, weights, layer.table)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    calls = []
    experts(x, ids, weights, [lambda rows, expert=expert: calls.append((expert, len(rows))) or rows for expert in range(EXPERTS)])
    assert calls == [(3, 20)]


def test_a_tokens_bits_are_the_same_among_any_others(native, dtype):
    layer, form, x = Layer(dtype), native(dtype).experts, torch.randn(60, HIDDEN).to(dtype)
    ids, weights = choices(60, 3)
    whole = form(x, ids, weights, layer.table)
    for first, count in ((0, 1), (7, 2), (20, 5), (31, 29)):
        rows = slice(first, first + count)
        assert torch.equal(form(x[rows], ids[rows], weights[rows], layer.table), whole[rows])
    order = torch.randperm(60)
    assert torch.equal(form(x[order], ids[order], weights[order], layer.table), whole[order])


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_compiled_routing_is_the_reference(native, dtype, rule, biased):
    logits, bias = (torch.randn(50, 8) * 2).to(dtype), torch.randn(8) if biased else None
    ids, weights = native(dtype).route(logits, bias, rule)
    expected_ids, expected = route(logits, bias, rule)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert ids.dtype is torch.int32 and weights.dtype is torch.float32


def test_the_bias_chooses_and_does_not_weigh(ops_in):
    logits, bias = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([5.0, 0.0, 0.0, 0.0])
    ids, weights = ops_in(torch.float32).route(logits, bias, Routing(2, sigmoid=True))
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, logits[:, [0, 3]].sigmoid())


def test_a_group_is_ranked_by_its_two_best(ops_in):
    """The second group has the best expert of all, and the first the better pair."""
    logits = torch.tensor([[1.0, 1.0, -9.0, 1.5, -9.0, -9.0]])
    rule = Routing(2, sigmoid=True, groups=2, top_groups=1, group_best=2)
    assert ops_in(torch.float32).route(logits, None, rule)[0].tolist() == [[0, 1]]
    assert ops_in(torch.float32).route(logits, None, Routing(1, groups=2, top_groups=1))[0].tolist() == [[3]]


def test_ties_go_to_the_lower_number(ops_in):
    form = ops_in(torch.float32).route
    assert form(torch.zeros(3, 9), None, Routing(4))[0].tolist() == [[0, 1, 2, 3]] * 3
    ids, weights = form(torch.zeros(2, 4), torch.full((4,), float("-inf")), Routing(2, sigmoid=True, renormalise=True))
    assert ids.tolist() == [[0, 1]] * 2  # all experts refuse: the choice is still one of experts
    torch.testing.assert_close(weights, torch.full((2, 2), 0.5))


def test_routing_what_is_not_finite_gives_experts_that_exist(ops_in):
    ids, weights = ops_in(torch.float32).route(torch.full((2, 6), float("nan")), None, Routing(3, renormalise=True))
    assert ((ids >= 0) & (ids < 6)).all() and weights.isnan().all()
    assert all(len(set(row)) == 3 for row in ids.tolist())


def test_a_token_that_all_experts_refuse_goes_to_the_first_ones_with_their_own_weights(ops_in):
    """A correction bias decides which experts a token gets, not how much they count."""
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.0, -2.0]])
    ids, weights = ops_in(torch.float32).route(logits, torch.full((6,), float("-inf")), Routing(3, sigmoid=True))
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, :3])


def test_no_tokens_have_no_experts(ops_in):
    ids, weights = ops_in(torch.float32).route(torch.empty(0, 6), None, Routing(3))
    assert ids.shape == weights.shape == (0, 3)


# --- weights of few bits ---

PACKED = {
    "int8": ("int8", None, None),
    "int4-groups": ("int4", 16, None),
    "e4m3-rounded": ("e4m3", 16, Rounding("float8", True, 16)),
    "e2m1": ("e2m1", 16, None),
    "int8-fixed": ("int8", None, Rounding("int8", False)),
    "whole-numbers": ("int8", 14, Rounding("int8", True), True),
    "whole-numbers-fixed": ("int8", None, Rounding("int8", False), True),
}


class PackedExperts:
    """Random experts of few bits: with biases, zero points in some, and a scale of their own for fixed roundings.

    Args:
        whole: Whether inputs are whole numbers too.
    """

    def __init__(self, dtype: torch.dtype, number, group: int | None, rounding: Rounding | None, whole: bool = False) -> None:
        self.whole = whole
        self.layers = [
            [self._layer(dtype, *shape, number, group, rounding, expert) for expert in range(EXPERTS)]
            for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        ]
        self.table = PackedExpertTable(self.layers[0], self.layers[1], HIDDEN, INNER, "silu")

    def _layer(self, dtype, outputs, inputs, number, group, rounding, expert) -> PackedLayer:
        size = group or inputs
        values = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
        if number == "e4m3":
            values = torch.randn(outputs, inputs).to(torch.float8_e4m3fn).view(torch.int8)
        scales = (torch.rand(outputs, -(-inputs // size)) + 0.5) / 20
        asymmetric = expert % 2 and (number == "int4" or self.whole)
        zeros = torch.randint(-3, 3, scales.shape, dtype=torch.int8) if asymmetric else None
        if self.whole:
            weight = pack_integers(values, scales, zeros, size, rounding)
        else:
            weight = pack_quantized(pair_up(values, number), scales, zeros, number, size, inputs)
        fixed = rounding is not None and not rounding.dynamic
        scale, zero = (torch.tensor([0.02 + expert / 100]), torch.tensor([-4.0])) if fixed else (None, None)
        return PackedLayer(weight, torch.randn(outputs).to(dtype), rounding, scale, zero)

    def mlps(self, ops):
        def linear(layer: PackedLayer, x: torch.Tensor) -> torch.Tensor:
            if self.whole:
                return ops.integer_linear(x, layer.weight, layer.rounding, layer.input_scale, layer.input_zero, layer.bias)
            if layer.rounding is not None:
                x = ops.rounded_inputs(x, layer.rounding, layer.input_scale, layer.input_zero)
            return ops.quantized_linear(x, layer.weight, layer.bias)

        return [
            lambda x, first=first, last=last: linear(last, ops.silu_mul(linear(first, x)))
            for first, last in zip(*self.layers, strict=True)
        ]


@pytest.fixture(params=PACKED)
def packed(request, dtype):
    return PackedExperts(dtype, *PACKED[request.param])


@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("k", [1, 3])
def test_packed_experts_are_their_layers_one_after_the_other(native, dtype, packed, tokens, k):
    """Of the same compiled layers, each of which is held to float64 by itself: only the order of a sum may round otherwise."""
    ops, x = native(dtype), torch.randn(tokens, HIDDEN).to(dtype)
    ids, weights = choices(tokens, k)
    found, expected = ops.packed_experts(x, ids, weights, packed.table), experts(x, ids, weights, packed.mlps(ops))
    assert found.dtype is dtype and found.shape == x.shape
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_packed_experts_without_tokens_are_not_multiplied(native, dtype, packed):
    ops, x = native(dtype), torch.randn(20, HIDDEN).to(dtype)
    ids, weights = torch.full((20, 1), 3, dtype=torch.int32), torch.rand(20, 1)
    expected = ops.packed_experts(x, ids, weights, packed.table)
    for expert in (0, 1, 2, 4):
        packed.table.gate_up_at[expert] = packed.table.down_at[expert] = 8  # to read from there ends the process
    assert torch.equal(ops.packed_experts(x, ids, weights, packed.table), expected)


def test_a_tokens_bits_are_the_same_among_any_others_of_packed_experts(native, dtype, packed):
    form, x = native(dtype).packed_experts, torch.randn(60, HIDDEN).to(dtype)
    ids, weights = choices(60, 3)
    whole = form(x, ids, weights, packed.table)
    for first, count in ((0, 1), (7, 2), (31, 29)):
        rows = slice(first, first + count)
        assert torch.equal(form(x[rows], ids[rows], weights[rows], packed.table), whole[rows])
    order = torch.randperm(60)
    assert torch.equal(form(x[order], ids[order], weights[order], packed.table), whole[order])


def test_a_tape_runs_packed_experts_again(native):
    ops, layer = native(torch.float32), PackedExperts(torch.float32, *PACKED["e4m3-rounded"])
    x, (ids, weights) = torch.randn(4, HIDDEN), choices(4, 2)
    tape = ops.tape(lambda: ops.packed_experts(x, ids, weights, layer.table), Pool())
    x.copy_(torch.randn(4, HIDDEN))
    assert torch.equal(tape.run(), ops.packed_experts(x, ids, weights, layer.table))


def test_experts_of_several_forms_are_told_apart():
    layers = PackedExperts(torch.float32, *PACKED["int4-groups"]).layers[0]
    other = PackedExperts(torch.float32, *PACKED["int8"]).layers[0]
    whole = PackedExperts(torch.float32, *PACKED["whole-numbers"]).layers[0]
    assert alike(layers) and not alike([*layers[:-1], other[-1]]) and not alike([*layers[:-1], whole[-1]])
