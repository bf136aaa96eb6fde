"""What a quantized linear method needs of layers and loader, shown by one: eight-bit values, four in a word, scaled by blocks."""

from collections.abc import Mapping

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from penstock.engine.config import ConfigError
from penstock.engine.loading.dummy import load_dummy
from penstock.engine.loading.safetensors import check_weights, load_mapped
from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from penstock.engine.models.layers.linear_method import UnquantizedLinearMethod
from penstock.engine.models.layers.projection import Axis, LinearLayer, Projection, TensorSpec
from penstock.engine.models.layers.shard import Shard
from penstock.engine.models.layers.weight import Weight, Weights, fused
from penstock.kernels.ops import REFERENCE

CPU, ALONE = torch.device("cpu"), Shard()
BLOCK = 16
HIDDEN, INNER = 48, 72
"""Half of the inner size is no multiple of the block: two ranks share a scale."""


class PackedLinearMethod:
    """Weight [out, in] as words [out, in / 4], scales by block of outputs, and one factor for a whole projection."""

    device = CPU

    def __init__(self, layer: LinearLayer) -> None:
        self.weight = torch.full((layer.out_features, layer.in_features), float("nan"), dtype=layer.dtype)
        self.words, self.taken = dict[str, torch.Tensor](), dict[str, tuple[Projection, dict[str, torch.Tensor]]]()

    def tensors(self, projection: Projection) -> Mapping[str, TensorSpec]:
        outputs, inputs = projection.shape
        return {
            "weight_packed": TensorSpec((outputs, inputs // 4), (torch.int32,), outputs=Axis(0), inputs=Axis(1, 4)),
            "weight_scale": TensorSpec((-(-outputs // BLOCK),), outputs=Axis(0, BLOCK, shared=True)),
            "factor": TensorSpec((1,), (torch.float32,)),
        }

    def load(self, projection: Projection, name: str, value: torch.Tensor) -> None:
        self.taken.setdefault(projection.name, (projection, {}))[1][name] = self.tensors(projection)[name].cut(value, projection)

    def tie(self, weight: torch.Tensor) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        for projection, parts in self.taken.values():
            rows = projection.outputs.start + torch.arange(projection.outputs.size)
            scale = parts["weight_scale"][rows // BLOCK - projection.outputs.start // BLOCK]
            values = parts["weight_packed"].contiguous().view(torch.int8).to(self.weight.dtype)
            self.weight[projection.offset : projection.offset + len(rows)] = values * scale[:, None] * parts["factor"]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Mlp:
    """Two layers, of which a name decides how each holds its weights."""

    def __init__(self, shard: Shard = ALONE, plain: str = "") -> None:
        def method(layer: LinearLayer):
            self.names.append((layer.name, layer.modules))
            return UnquantizedLinearMethod(layer) if layer.name == plain else PackedLinearMethod(layer)

        self.names: list[tuple[str, tuple[str, ...]]] = []
        build = Build(REFERENCE, method, torch.float64, 64, shard, prefix="layers.3").within("mlp")
        self.gate_up = GateUpParallelLinear(HIDDEN, INNER, False, build)
        self.down = RowParallelLinear("down_proj", shard.span(INNER, "inner"), HIDDEN, False, build)

    def weights(self) -> Weights:
        return self.gate_up.weights() | self.down.weights()

    def ignores(self, name: str) -> bool:
        return False

    def finish(self) -> "Mlp":
        self.gate_up.finish()
        self.down.finish()
        return self


def stored() -> dict[str, torch.Tensor]:
    """A checkpoint."""
    torch.manual_seed(0)
    found = {}
    for name, (outputs, inputs) in {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }.items():
        found[f"{name}.weight_packed"] = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8).view(torch.int32)
        found[f"{name}.weight_scale"] = torch.rand(-(-outputs // BLOCK))
        found[f"{name}.factor"] = torch.rand(1)
    return found


def load(model: Mlp, tmp_path, tensors: dict[str, torch.Tensor] | None = None) -> Mlp:
    safetensors.torch.save_file(stored() if tensors is None else tensors, tmp_path / "model.safetensors")
    load_mapped(model, check_weights(model, tmp_path))
    return model.finish()


def test_two_ranks_hold_what_one_does(tmp_path):
    whole, ranks = load(Mlp(), tmp_path), [load(Mlp(Shard(rank, 2)), tmp_path) for rank in range(2)]
    gates, ups = zip(*(rank.gate_up._method.weight.chunk(2) for rank in ranks), strict=True)
    assert torch.equal(torch.cat((*gates, *ups)), whole.gate_up._method.weight)
    assert torch.equal(torch.cat([rank.down._method.weight for rank in ranks], 1), whole.down._method.weight)
    assert not whole.gate_up._method.weight.isnan().any()


def test_each_layer_is_asked_by_its_name(tmp_path):
    model = Mlp(plain="layers.3.mlp.down_proj")
    assert model.names == [
        ("layers.3.mlp.gate_up_proj", ("layers.3.mlp.gate_proj", "layers.3.mlp.up_proj")),
        ("layers.3.mlp.down_proj", ("layers.3.mlp.down_proj",)),
    ]
    assert {name for name in model.weights() if "down" in name} == {"down_proj.weight"}
    tensors = {name: value for name, value in stored().items() if "down" not in name}
    tensors["down_proj.weight"] = torch.rand(HIDDEN, INNER)
    load(model, tmp_path, tensors)
    assert torch.equal(model.down._method.weight, tensors["down_proj.weight"].double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_proj.weight_packed": torch.zeros(HIDDEN, INNER // 4)}, r"down_proj.weight_packed: dtype F32, expected I32$"),
        ({"down_proj.weight_packed": torch.zeros(HIDDEN, INNER, dtype=torch.int32)}, r"shape \[48, 72\], expected \[48, 18\]"),
        (
            {"up_proj.weight_scale": torch.zeros(5, dtype=torch.int32)},
            r"weight_scale: dtype I32, expected BF16 or F16 or F32",
        ),
        ({"up_proj.input_scale": torch.zeros(1)}, r"has the unexpected tensors up_proj.input_scale$"),
    ],
)
def test_tensors_that_no_method_takes_are_named(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load(Mlp(), tmp_path, stored() | change)


def test_a_cut_through_a_packed_word_is_refused_before_anything_is_read():
    with pytest.raises(ValueError, match=r"layers.3.mlp.down_proj.weight_packed: a rank's features 0 to 9 of 72 .* holds 4"):
        Mlp(Shard(0, 8)).weights()


def test_tensors_of_any_dtype_are_made_up():
    models = [Mlp(), Mlp()]
    for model in models:
        load_dummy(model, torch.bfloat16, CPU)
        model.finish()
    first, second = (model.gate_up._method.weight for model in models)
    assert torch.equal(first, second) and first.unique().numel() > 1000 and first.isfinite().all()


def test_a_checkpoint_may_hold_projections_as_one(tmp_path):
    """Each kind of tensor is cut along its own outputs; a factor of all outputs goes to every projection."""
    build = Build(REFERENCE, PackedLinearMethod, torch.float64, 64, Shard())
    layer = QKVParallelLinear(HIDDEN, 4, 2, 16, False, build)
    weights = fused(
        {f"self_attn.{name}": weight for name, weight in layer.weights().items()}, ("q_proj", "k_proj", "v_proj"), "qkv_proj"
    )
    assert {name.rpartition(".")[2]: weight.shape for name, weight in weights.items()} == {
        "weight_packed": (128, 12),
        "weight_scale": (8,),
        "factor": (1,),
    }
    words = torch.randint(-128, 128, (128, HIDDEN), dtype=torch.int8)
    given = {"weight_packed": words.view(torch.int32), "weight_scale": torch.arange(1.0, 9.0), "factor": torch.tensor([0.5])}
    for name, weight in weights.items():
        weight.load(given[name.rpartition(".")[2]])
    layer.finish()
    scales = given["weight_scale"].repeat_interleave(BLOCK)[:, None]
    assert torch.equal(layer._method.weight, (words * scales * 0.5).double())


def test_fused_outputs_need_not_be_the_first_dimension():
    taken: list[torch.Tensor] = []
    parts = {f"mlp.{name}.qweight": Weight((6, size), taken.append, output_dim=1) for name, size in (("gate", 4), ("up", 2))}
    (weight,) = fused(parts, ("gate", "up"), "gate_up").values()
    assert weight.shape == (6, 6)
    weight.load(torch.arange(36).view(6, 6))
    assert [tuple(part.shape) for part in taken] == [(6, 4), (6, 2)] and taken[1][0].tolist() == [4, 5]
