"""Linear layers in shards, their methods' bits, and rotary angles."""

import os
import subprocess
import sys
from itertools import cycle

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.lora.linear import LoraLinearMethod
from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from penstock.engine.models.layers.linear_choice import linear_method
from penstock.engine.models.layers.linear_method import (
    NativeLinearMethod,
    PrepackedLinearMethod,
    UnquantizedLinearMethod,
)
from penstock.engine.models.layers.projection import LinearLayer, Projection
from penstock.engine.models.layers.rotary import inverse_frequencies
from penstock.engine.models.layers.shard import Shard
from penstock.engine.models.rope import parse_ropes
from penstock.kernels.cpu.isa import available, choose
from penstock.kernels.lora.batch import LoraBatch
from penstock.kernels.ops import REFERENCE, ops_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ISAS = [isa.name for isa in available()]
WORLD = 2


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def linear(in_features: int, out_features: int, dtype: torch.dtype, bias: bool = False) -> LinearLayer:
    """A layer of one projection."""
    inputs, outputs = Shard().span(in_features, "inputs"), Shard().span(out_features, "outputs")
    return LinearLayer("model.some_proj", (Projection("some_proj", inputs, outputs, 0),), bias, dtype)


def building(shard: Shard, dtype: torch.dtype, method=UnquantizedLinearMethod) -> Build:
    """What layers are built with. Their sums are left to the test: nothing connects the ranks."""
    return Build(ops=REFERENCE, linear_method=method, dtype=dtype, max_model_len=64, shard=shard)


def fill(layer, values: dict[str, torch.Tensor]):
    for name, weight in layer.weights().items():
        assert tuple(values[name].shape) == weight.shape
        weight.load(values[name])
    layer.finish()
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", *ISAS])
def test_a_rows_bits_do_not_depend_on_the_others(dtype, kind):
    make = UnquantizedLinearMethod if kind == "plain" else linear_method(dtype, ops_for("cpu", dtype, kind))
    layer = linear(96, 259, dtype, bias=True)
    method = make(layer)
    method.load(layer.projections[0], "weight", torch.randn(259, 96))
    method.load(layer.projections[0], "bias", torch.randn(259))
    method.finish()
    x = torch.randn(300, 96).to(dtype)
    whole = method.apply(x)
    for count in (1, 2, 3, 4, 7, 16, 33, 128):
        assert torch.equal(method.apply(x[100 : 100 + count]), whole[100 : 100 + count]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ISAS)
def test_one_thread_multiplies_by_our_own_kernel(name, dtype):
    ops = ops_for("cpu", dtype, name)
    assert isinstance(linear_method(dtype, ops)(linear(32, 32, dtype)), NativeLinearMethod)
    assert not isinstance(linear_method(torch.float32, ops, threads=2)(linear(32, 32, dtype)), NativeLinearMethod), (
        "oneDNN has several threads"
    )


def test_several_threads_get_our_own_kernel_where_onednn_has_none(monkeypatch, caplog):
    monkeypatch.setattr(PrepackedLinearMethod, "finish", _refuse)
    make = linear_method(torch.bfloat16, ops_for("cpu", torch.bfloat16), threads=2)
    assert isinstance(make(linear(32, 32, torch.bfloat16)), NativeLinearMethod)
    assert "native-one-thread, slower than several threads (native: one thread instead of 2; onednn: no such" in caplog.text


ASKED_OF_ONEDNN = """
import sys, torch
from penstock.engine.models.layers.linear_choice import linear_method
from penstock.engine.models.layers.linear_method import PrepackedLinearMethod
from penstock.engine.models.layers.projection import LinearLayer, Projection
from penstock.engine.models.layers.shard import Span
from penstock.kernels.ops import ops_for
torch.set_num_threads(1)
chosen = linear_method(torch.bfloat16, ops_for("cpu", torch.bfloat16, sys.argv[1]), int(sys.argv[2]))
projection = Projection("some_proj", Span(96, 0, 96), Span(64, 0, 64), 0)
for make, dtype in ((chosen, torch.bfloat16), (PrepackedLinearMethod, torch.float32)):
    method = make(LinearLayer("some_proj", (projection,), False, dtype))
    method.load(projection, "weight", torch.randn(64, 96))
    method.finish()
    for rows in (1, 5, 300):
        method.apply(torch.randn(rows, 96).to(dtype))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "threads"), [*zip([name for name in ISAS if choose(name).environment], cycle((2, 1)))])
def test_a_process_on_a_lesser_set_keeps_onednn_to_it(name, threads):
    """With the environment that the engine gives its core. Below AVX-512 there are no products of bfloat16."""
    environment = {**os.environ, **choose(name).environment, "ONEDNN_VERBOSE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", ASKED_OF_ONEDNN, name, str(threads)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    done = [line.lower() for line in said.splitlines() if ",exec," in line]
    beyond = ("amx",) if name == "avx512_bf16" else ("amx", "avx512", "bf16")
    assert done and not [line for line in done if any(word in line for word in beyond)]


class LinearShapes(TorchDispatchMode):
    """The numbers of rows that oneDNN sees."""

    def __init__(self):
        super().__init__()
        self.rows = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.rows.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_onednn_compiles_for_few_numbers_of_rows():
    # In float32, which oneDNN multiplies on every CPU; numbers of rows are padded whatever the dtype.
    layer = linear(16, 16, torch.float32)
    method = PrepackedLinearMethod(layer)
    method.load(layer.projections[0], "weight", torch.randn(16, 16))
    method.finish()
    x = torch.randn(600, 16)
    with LinearShapes() as seen:
        for rows in range(1, 601):
            assert method.apply(x[:rows]).shape == (rows, 16)
    assert len(seen.rows) < 50


def _refuse(self: PrepackedLinearMethod) -> None:
    raise RuntimeError("no such instruction")


def test_falls_back_by_name_where_onednn_cannot(monkeypatch, caplog):
    monkeypatch.setattr(PrepackedLinearMethod, "finish", _refuse)
    assert linear_method(torch.float32, REFERENCE) is UnquantizedLinearMethod
    assert "no such instruction" in caplog.text


def test_shards_of_columns_are_parts_and_of_rows_add_up():
    hidden, inner = 32, 24
    values = {f"{name}_proj.weight": torch.randn(inner, hidden).double() for name in ("gate", "up")}
    values["down_proj.weight"], values["down_proj.bias"] = torch.randn(hidden, inner).double(), torch.randn(hidden).double()
    x = torch.randn(5, hidden).double()
    gate, up = (x @ values[f"{name}_proj.weight"].T for name in ("gate", "up"))
    total = torch.zeros(5, hidden).double()
    for rank in range(WORLD):
        shard = Shard(rank, WORLD)
        gate_up = fill(GateUpParallelLinear(hidden, inner, False, building(shard, torch.float64)), values)
        part = slice(rank * inner // WORLD, (rank + 1) * inner // WORLD)
        torch.testing.assert_close(gate_up(x), torch.cat((gate[:, part], up[:, part]), -1))
        down = RowParallelLinear("down_proj", shard.span(inner, "inner"), hidden, True, building(shard, torch.float64))
        total += fill(down, values)(gate[:, part] * up[:, part])
    torch.testing.assert_close(total, (gate * up) @ values["down_proj.weight"].T + values["down_proj.bias"])


@pytest.mark.req("LO-11")
@pytest.mark.parametrize("form", ["reference", *ISAS])
def test_shards_of_adapters_add_up_too(form):
    hidden, inner, rank = 32, 24, 5
    ops = REFERENCE if form == "reference" else ops_for("cpu", torch.float32, form)
    batch, x, given = LoraBatch(1, 5), torch.randn(5, hidden), torch.randn(5, inner)
    batch.fill(np.zeros(5, np.int32))
    factors = {name: (torch.randn(rank, hidden), torch.randn(inner, rank)) for name in ("gate_proj", "up_proj")}
    factors["down_proj"] = torch.randn(rank, inner), torch.randn(hidden, rank)

    def adapted(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        def method(layer: LinearLayer) -> LoraLinearMethod:
            return LoraLinearMethod(UnquantizedLinearMethod(layer), layer, ops, batch)

        build = building(shard, torch.float32, method)
        layers = [
            GateUpParallelLinear(hidden, inner, False, build),
            RowParallelLinear("down_proj", shard.span(inner, "inner"), hidden, False, build),
        ]
        for layer in layers:
            fill(layer, {name: torch.zeros(weight.shape) for name, weight in layer.weights().items()})
            modules, weights = zip(*layer.weights().items(), strict=True)
            shelves = weights[0].part.method.shelve(1, rank, [(weight.part.offset, weight.part.size) for weight in weights])
            for name, weight, shelf in zip(modules, weights, shelves, strict=True):
                shelf.put(0, *weight.part.narrow(*factors[name.removesuffix(".weight")]))
        return layers[0](x), layers[1](shard.span(inner, "inner").narrow(given, 1))

    (whole, total), parts = adapted(Shard()), [adapted(Shard(rank, WORLD)) for rank in range(WORLD)]
    halves = [column.chunk(2, -1) for column, _ in parts]
    torch.testing.assert_close(torch.cat([half[kind] for kind in range(2) for half in halves], -1), whole)
    torch.testing.assert_close(sum(row for _, row in parts), total)


def test_qkv_says_how_to_split():
    layer = QKVParallelLinear(16, 8, 2, 4, True, building(Shard(1, WORLD), torch.float32))
    assert layer.sizes == [16, 4, 4]
    assert {name: weight.shape for name, weight in layer.weights().items() if "k_proj" in name} == {
        "k_proj.weight": (8, 16),
        "k_proj.bias": (8,),
    }


def test_refuses_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="intermediate_size 9 cannot be divided among 2 ranks"):
        GateUpParallelLinear(8, 9, False, building(Shard(0, WORLD), torch.float32))


ROPES = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "dynamic": {"factor": 8.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0},
    "yarn-rough": {
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "mscale": 2.0,
        "mscale_all_dim": 1.0,
    },
    "longrope": {
        "original_max_position_embeddings": 512,
        "short_factor": [1.5] * 24,
        "long_factor": [2.0 + i for i in range(24)],
    },
}


@pytest.mark.parametrize("length", [300, 4096, 6000])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name, length):
    """Of 48 of 64 elements, where the longest sequence is within what the model was trained with and beyond."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, sizes = name.partition("-")[0], {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
    parameters = {"rope_type": kind, "rope_theta": 5e5, "partial_rotary_factor": 0.75} | ROPES[name]
    rope = parse_ropes({"rope_parameters": parameters}, 64, 4096).whole
    assert rope.size == 48
    if kind == "default":
        expected, factor = 1.0 / 5e5 ** (torch.arange(0, 48, 2) / 48), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](transformers.LlamaConfig(**sizes, rope_parameters=parameters), "cpu", length)
    torch.testing.assert_close(inverse_frequencies(rope, length), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)
