"""Linear layers and experts of few bits on a GPU against float64: interpreted here, compiled on a GPU."""

import pytest
import torch
from test_experts import EXPERTS, HIDDEN, INNER, PACKED, PackedExperts, choices
from test_quantized_linear import made

from penstock.kernels.experts.reference import experts
from penstock.kernels.experts.table import PackedExpertTable, PackedLayer
from penstock.kernels.experts.triton import packed_experts
from penstock.kernels.ops import REFERENCE
from penstock.kernels.quantized_linear.launch import FEW, LEAST_BLOCK, MANY, SOME, block_of, launch_of
from penstock.kernels.quantized_linear.reference import QuantizedWeight, dequantized, pack_quantized, pair_up
from penstock.kernels.quantized_linear.triton import quantized_linear

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
"""Not bfloat16: the interpreter multiplies its bits as whole numbers."""
SCHEMES = [
    ("int8", 0, torch.float32),
    ("int8", 32, torch.bfloat16),
    ("int4", 32, torch.bfloat16),
    ("int4", 0, torch.float32),
    ("e4m3", 0, torch.float32),
    ("e4m3", 128, torch.float32),
]


def on(device: str, weight: QuantizedWeight) -> QuantizedWeight:
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    return weight._replace(values=weight.values.to(device), scales=weight.scales.to(device), zeros=zeros)


def check(device, dtype, packed, weight, rows, bias=None):
    x = torch.randn(rows, packed.in_features).to(dtype)
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    out = quantized_linear(x.to(device), on(device, packed), None if bias is None else bias.to(device)).cpu()
    assert out.dtype is dtype and out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)


@pytest.mark.req("Q-08")
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "shape", "rows"),
    [(torch.float32, (40, 160), 3), (torch.float16, (17, 96), 20), (torch.float32, (9, 64), 0)],
    ids=str,
)
def test_quantized_linear_equals_float64(triton_device, dtype, scheme, shape, rows):
    """Ends of panels, of tiles and of groups."""
    torch.manual_seed(0)
    packed, weight = made(torch.randn(shape), scheme)
    check(triton_device, dtype, packed, weight, rows, torch.randn(shape[0]).to(dtype) if rows == 3 else None)


def coded(number, rows, inputs, group, zeros=None, scale_dtype=torch.float32) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight of all codes, each but those that are no numbers."""
    codes = torch.arange(rows * inputs).view(rows, inputs).to(torch.uint8).view(torch.int8)
    codes = torch.where((codes & 127) == 127, 0, codes) if number == "e4m3" else codes
    codes = ((codes << 4) >> 4) if number == "int4" else codes
    scales = (torch.rand(rows, -(-inputs // group)) + 0.5).to(scale_dtype)
    packed = pack_quantized(pair_up(codes, number), scales, zeros, number, group, inputs)
    return packed, dequantized(packed).double()


@pytest.mark.parametrize(
    ("number", "group", "zeros"),
    [("e4m3", 48, False), ("e2m1", 32, False), ("int4", 32, True), ("int8", 16, True), ("int4", 24, False), ("int8", 98, True)],
)
def test_every_code_means_the_same_as_on_a_cpu(triton_device, number, group, zeros):
    """With zero points, groups that are no power of two, and an odd number of inputs. The reference has tests of its own."""
    torch.manual_seed(0)
    rows, inputs = 35, 97
    points = torch.randint(-8, 8, (rows, -(-inputs // group))).to(torch.int8) if zeros else None
    packed, weight = coded(number, rows, inputs, group, points)
    x = torch.randn(5, inputs)
    out = quantized_linear(x.to(triton_device), on(triton_device, packed), None).cpu()
    size = weight.abs().max().item()
    torch.testing.assert_close(out.double() / size, x.double() @ weight.T / size, rtol=1e-5, atol=2e-5)


def test_rows_may_lie_apart(triton_device):
    packed, weight = made(torch.randn(24, 64), SCHEMES[2])
    x = torch.randn(9, 3 * 64).to(triton_device)[:, 64:128]
    out = quantized_linear(x, on(triton_device, packed), None).cpu()
    torch.testing.assert_close(out.double(), x.cpu().double() @ weight.T, rtol=1e-5, atol=1e-4)


def test_launches_go_by_the_rows_and_by_the_group():
    assert [launch_of(rows, wide=False) for rows in (1, 16, 17, 256, 257)] == [FEW, FEW, SOME, SOME, MANY]
    assert launch_of(1000, wide=True) == SOME
    assert [block_of(FEW, group) for group in (2, 32, 48, 128, 4096)] == [LEAST_BLOCK, 32, 64, 128, 128]


@pytest.mark.slow
@pytest.mark.req("Q-26")
@pytest.mark.parametrize("name", [name for name in PACKED if not name.startswith("whole")])
@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (2, 1), (21, 3)])
def test_experts_of_few_bits_equal_their_layers_one_after_the_other(triton_device, name, tokens, k):
    """With zero points in some experts, biases, and inputs that are rounded by token, by group, or by a scale of each expert."""
    torch.manual_seed(0)
    layer = PackedExperts(torch.float32, *PACKED[name])
    x, (ids, weights) = torch.randn(tokens, HIDDEN), choices(tokens, k)
    found = packed_experts(*(part.to(triton_device) for part in (x, ids, weights)), table_on(triton_device, layer)).cpu()
    torch.testing.assert_close(found, experts(x, ids, weights, layer.mlps(REFERENCE)), rtol=1e-4, atol=1e-4)


def test_experts_of_few_bits_that_no_token_chose_are_not_read(triton_device):
    torch.manual_seed(0)
    layer = PackedExperts(torch.float32, *PACKED["int4-groups"])
    table = table_on(triton_device, layer)
    x, ids, weights = torch.randn(20, HIDDEN), torch.full((20, 1), 3, dtype=torch.int32), torch.rand(20, 1)
    for expert in (0, 1, 2, 4, 5)[: EXPERTS - 1]:
        table.gate_up_at[expert] = table.down_at[expert] = 0  # to read from there ends the process
    found = packed_experts(*(part.to(triton_device) for part in (x, ids, weights)), table).cpu()
    torch.testing.assert_close(found, experts(x, ids, weights, layer.mlps(REFERENCE)), rtol=1e-4, atol=1e-4)


def table_on(device: str, layer: PackedExperts) -> PackedExpertTable:
    def moved(one):
        others = [None if tensor is None else tensor.to(device) for tensor in (one.bias, one.input_scale, one.input_zero)]
        return PackedLayer(on(device, one.weight), others[0], one.rounding, *others[1:])

    return PackedExpertTable(*([moved(one) for one in layers] for layers in layer.layers), HIDDEN, INNER, "silu")
