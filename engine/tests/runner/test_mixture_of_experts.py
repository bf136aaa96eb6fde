"""Checkpoints with experts: what is missing, what is not needed, and what their weights compute."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MOE

from penstock.engine.config import ConfigError
from penstock.engine.loading.safetensors import check_weights
from penstock.engine.models.layers.experts import Experts
from penstock.engine.sampling import SamplingParams
from penstock.kernels.quantized_linear.reference import E2M1

FILE = "model.safetensors"


def changed(path: Path, to: Path, change) -> Path:
    """A copy whose tensors a function has changed."""
    shutil.copytree(path, to)
    tensors = load_file(path / FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / FILE, metadata={"format": "pt"})
    return to


def test_a_missing_expert_is_named(checkpoint, build_runner, tmp_path):
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    path = changed(checkpoint("mixtral"), tmp_path / "lacking", lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=f"lacks the tensors {name}"):
        build_runner(path)


def test_an_expert_too_many_is_named(checkpoint, build_runner, tmp_path):
    path = changed(checkpoint("mixtral"), tmp_path / "fewer", lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    with pytest.raises(ConfigError, match=r"shape \[5, 64\], expected \[4, 64\]|unexpected tensors .*experts\.4"):
        build_runner(path)


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe"])
def test_one_tensor_for_all_experts_is_loaded_as_well(name, checkpoint, build_runner, loaded, driver, tmp_path):
    path = changed(checkpoint(name), tmp_path / "fused", fuse)
    runner = build_runner(path)
    outputs = [play.generate(play.admit([5, 6, 7, 8]), 8) for play in (driver(runner), driver(loaded(name)))]
    assert outputs[0] == outputs[1]
    parts = [tensor for tensor in check_weights(runner.model, path) if tensor.rows is not None]
    assert len(parts) >= 3 * 7
    whole = load_file(checkpoint(name) / FILE)
    with (path / FILE).open("rb") as stream:
        for part in parts:  # as a device reads them
            stream.seek(part.offset)
            values = torch.frombuffer(bytearray(stream.read(part.size)), dtype=torch.float32).view(part.shape)
            assert torch.equal(values, whole[part.name])


def fuse(tensors) -> None:
    """Puts the experts of a layer into two tensors."""
    for base in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        names = [name for name in tensors if name.startswith(f"{base}.experts.")]
        parts = {name.removeprefix(f"{base}.experts."): tensors.pop(name) for name in names}
        gates = range(len(parts) // 3)
        pairs = [torch.cat((parts[f"{at}.gate_proj.weight"], parts[f"{at}.up_proj.weight"])) for at in gates]
        tensors[f"{base}.experts.gate_up_proj"] = torch.stack(pairs)
        tensors[f"{base}.experts.down_proj"] = torch.stack([parts[f"{at}.down_proj.weight"] for at in gates])


KNOWN = 40
"""Tokens of the vocabulary that the next test's models know, each a direction of its own."""


def make_known(tensors: dict[str, torch.Tensor], experts: int) -> None:
    """Makes weights of which one can tell what comes out: attention and shared experts add nothing, a token chooses the expert
    of its number, and an expert turns it into another token. What a layer adds is many times what was there."""
    unit, tokens = torch.eye(64), torch.arange(KNOWN)
    for name, tensor in tensors.items():
        part, layer = name.split(".")[-2], int(name.split(".")[2]) if ".layers." in name else 0
        if "norm" in part:
            tensor.fill_(1.0)
        elif part in ("embed_tokens", "lm_head"):
            tensor.zero_()[:KNOWN] = unit[:KNOWN]
        elif ".experts." in name and "bias" not in name:
            each = tensor if tensor.dim() == 3 else [tensor]
            number = [int(part) for part in name.split(".") if part.isdigit()][1:] or range(experts)
            for expert, weight in zip(number, each, strict=True):
                weight.zero_()
                after, much = (tokens + 1 + expert) % KNOWN, 300.0 ** (layer + 1)
                if name.endswith("gate_up_proj"):  # inputs before outputs, which are in turn
                    weight[tokens, 2 * tokens] = weight[tokens, 2 * tokens + 1] = 1.0
                elif name.endswith("down_proj"):
                    weight[tokens, after] = much
                elif part in ("down_proj", "w2"):
                    weight[after, tokens] = much
                else:
                    weight[tokens, tokens] = 1.0
        elif part in ("gate", "router") and name.endswith("weight"):
            tensor.fill_(-1.0)[tokens % experts, tokens] = 1.0
        else:
            tensor.zero_()


@pytest.mark.parametrize("name", MOE)
def test_each_token_is_what_its_experts_make_of_the_one_before(name, checkpoint, build_runner, driver, tmp_path):
    """Worked out by hand, from no other implementation."""
    config = json.loads((checkpoint(name) / "config.json").read_text())
    experts = next(config[field] for field in ("num_local_experts", "num_experts", "n_routed_experts") if field in config)
    path = changed(checkpoint(name), tmp_path / "known", lambda tensors: make_known(tensors, experts))
    runner = build_runner(path)
    play, expected, token = driver(runner), [], 11
    for _ in range(12):
        for layer in runner.model.layers:
            if hasattr(layer.mlp, "experts"):
                token = (token + 1 + token % experts) % KNOWN
        expected.append(token)
    assert len(set(expected)) > 4
    assert play.generate(play.admit([3, 7, 11]), 12) == expected


def test_layers_that_predict_further_tokens_are_left_out(checkpoint, build_runner, driver, tmp_path):
    def add(tensors):
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)

    path = changed(checkpoint("glm4-moe"), tmp_path / "further", add)
    play = driver(build_runner(path))
    plain = driver(build_runner(checkpoint("glm4-moe")))
    assert play.generate(play.admit([5, 6, 7]), 4) == plain.generate(plain.admit([5, 6, 7]), 4)

    def add_beyond(tensors):
        tensors["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)

    with pytest.raises(ConfigError, match=r"unexpected tensors model\.layers\.4\.eh_proj"):
        build_runner(changed(checkpoint("glm4-moe"), tmp_path / "beyond", add_beyond))


def test_an_expert_that_no_token_chooses_may_hold_anything(checkpoint, build_runner, driver, tmp_path):
    """All logits are 0, and of equal ones the first two win: weights of infinity in the last expert never meet a token."""

    def spoil(tensors):
        for layer in range(2):
            base = f"model.layers.{layer}.block_sparse_moe"
            tensors[f"{base}.gate.weight"].zero_()
            for part in ("w1", "w2", "w3"):
                tensors[f"{base}.experts.4.{part}.weight"].fill_(float("inf"))

    play = driver(build_runner(changed(checkpoint("mixtral"), tmp_path / "spoilt", spoil)))
    sequence = play.admit(list(range(40)), SamplingParams(max_tokens=5, temperature=0.0, logprobs=5))
    result = play.step([(sequence, 40)])
    assert torch.tensor(result.logprobs.top_logprobs).isfinite().all()


@pytest.mark.parametrize("name", ["mixtral", "glm4-moe", "gpt-oss"])
def test_the_fused_kernel_takes_all_experts(name, loaded):
    """Experts one by one would be right as well, and slow."""
    found = [layer.mlp.experts for layer in loaded(name).model.layers if hasattr(layer.mlp, "experts")]
    assert found and all(isinstance(experts, Experts) and experts.fused for experts in found)


def test_gpt_oss_lacks_no_expert(checkpoint, build_runner, tmp_path):
    def cut(tensors):
        name = "model.layers.1.mlp.experts.gate_up_proj"
        tensors[name] = tensors[name][:-1]

    path = changed(checkpoint("gpt-oss"), tmp_path / "cut", cut)
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: shape \[5, 64, 192\], expected \[6, 64, 192\]"
    ):
        build_runner(path)


@pytest.mark.parametrize(
    "name", ["self_attn.sinks", "mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"]
)
def test_each_addition_of_gpt_oss_changes_what_it_says(name, checkpoint, build_runner, loaded, driver, tmp_path):
    """So that the comparison with transformers would see it if one were left out."""

    def drop(tensors):
        for layer in range(3):
            tensors[f"model.layers.{layer}.{name}"].zero_()

    play, plain = driver(build_runner(changed(checkpoint("gpt-oss"), tmp_path / "less", drop))), driver(loaded("gpt-oss"))
    sampling = SamplingParams(max_tokens=5, temperature=0.0, logprobs=5)
    less, whole = (one.step([(one.admit(list(range(60)), sampling), 60)]).logprobs.top_logprobs for one in (play, plain))
    assert abs(less - whole).max() > 0.01


def pack_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of weights [experts, outputs, inputs]: the nearest E2M1 numbers under the least power of two that holds
    each 32 of them."""
    blocks = weight.unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    scaled = blocks / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


@pytest.fixture
def mxfp4(checkpoint, tmp_path) -> Path:
    """gpt-oss as OpenAI publishes it: experts in MXFP4."""

    def pack(tensors):
        for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
            blocks, scales = pack_mxfp4(tensors.pop(name).transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    path = changed(checkpoint("gpt-oss"), tmp_path / "mxfp4", pack)
    config = json.loads((path / "config.json").read_text())
    said = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return path


def test_gpt_oss_in_mxfp4_equals_transformers(mxfp4, build_runner, driver, caplog):
    transformers = pytest.importorskip("transformers")
    whole = transformers.Mxfp4Config(dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(mxfp4, quantization_config=whole, attn_implementation="eager")
    reference = reference.float().eval()
    tokens = torch.arange(150).mul(7).remainder(257).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    runner = build_runner(mxfp4)
    play = driver(runner)
    result = play.step([(play.admit(tokens, SamplingParams(max_tokens=5, temperature=0.0, logprobs=257)), 150)]).logprobs
    ids = torch.tensor(result.top_ids[0]).long()
    torch.testing.assert_close(torch.tensor(result.top_logprobs[0]), expected[ids], rtol=0, atol=3e-5)
    experts = runner.model.layers[0].mlp.experts
    held = sum(method.weight.nbytes for method in (*experts._gate_up, *experts._down))
    assert held <= 0.30 * 2 * sum(
        reference.model.layers[0].mlp.experts.get_parameter(f"{name}_proj").numel() for name in ("gate_up", "down")
    )
    assert "leaves out what no layer is called" not in caplog.text


def test_a_damaged_scale_of_an_expert_is_named(mxfp4, build_runner, tmp_path):
    def spoil(tensors):
        tensors["model.layers.1.mlp.experts.down_proj_scales"][4, 3, 1] = 255

    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.experts\.4\.down_proj\.weight_scale holds a scale that is not finite"
    ):
        build_runner(changed(mxfp4, tmp_path / "spoilt", spoil))
