"""MTP layers of a target's own checkpoint: they change no answer, and draft what plain torch drafts from the whole sequence."""

import json
import shutil

import msgspec
import pytest
import torch
from draft_heads import ReferenceMtp, Told
from quantized_checkpoints import LATENT_LAYERS, awq, fp8
from quantized_checkpoints import LAYERS as QUANTIZED
from safetensors.torch import load_file, save_file
from test_core_with_runner import SCHEDULER, Engine, requests
from test_draft_model import drafts_pay
from test_drafts_in_core import K, Watched

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError, SpeculativeConfig
from penstock.engine.quant.parse import fp8 as fp8_config

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm  # noqa: E402
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm  # noqa: E402

pytestmark = pytest.mark.slow

LAYERS = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm),
    "glm4-moe": (Glm4MoeDecoderLayer, Glm4MoeRMSNorm),
    "deepseek-v3": (DeepseekV3DecoderLayer, DeepseekV3RMSNorm),
}
BATCH = [it for it in requests(False) if it.index % 3 == 0 or it.index == 1]
"""Of requests with a common prefix one alone: the last entry of a shared block may rest on another one's next token."""


class Made:
    """A target whose checkpoint has an MTP layer, with the layer in plain torch and the target's answers without drafts."""

    def __init__(self, name, checkpoint, build_runner, folder) -> None:
        layer, norm = LAYERS[name]
        self.target = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint(name), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.reference = ReferenceMtp(self.target, layer, norm, recycles_normed=name != "glm4-moe")
        self.folder = self.reference.save(checkpoint(name), folder / name)
        runner, self.answers = build_runner(checkpoint(name), scheduler=SCHEDULER), {}
        for request in BATCH:
            self.answers |= Engine(runner, depth=1, num_blocks=100).run([request])


@pytest.fixture(scope="module", params=LAYERS)
def made(request, checkpoint, build_runner, tmp_path_factory):
    return Made(request.param, checkpoint, build_runner, tmp_path_factory.mktemp("mtp"))


def drafting(build_runner, monkeypatch, folder, depth=1, num_blocks=100):
    scheduler = msgspec.structs.replace(SCHEDULER, num_speculative_tokens=K, num_lookahead_tokens=K)
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=K)
    runner = build_runner(folder, scheduler=scheduler, speculative=speculative)
    drafts_pay(monkeypatch)
    return Watched(runner, depth, num_blocks)


@pytest.mark.parametrize(("crowded", "depth"), [(False, 1), (True, 1), (True, 2)], ids=["room", "crowded", "ahead"])
@pytest.mark.req("SD-16")
def test_an_mtp_layer_drafts_what_plain_torch_does_and_changes_no_token(build_runner, monkeypatch, made, crowded, depth):
    told = Told(monkeypatch)
    engine = drafting(build_runner, monkeypatch, made.folder, depth, 22 if crowded else 100)
    try:
        told.seen.clear()
        assert engine.run(BATCH) == made.answers
        assert (engine.core.stats().preemptions > 0) == crowded
    finally:
        engine.executor.close()
    told.compare(made.reference, made.target)


def test_other_weights_come_with_another_mtp_layer(build_runner, monkeypatch, made, tmp_path):
    """What the target is filled with again has a layer of its own; where it has none, nothing changes."""
    engine = drafting(build_runner, monkeypatch, made.folder)
    runner, other = engine.runner, tmp_path / "other"
    shutil.copytree(made.folder, other)
    tensors = load_file(other / "mtp.safetensors")
    name = next(name for name in tensors if name.endswith("eh_proj.weight"))
    torch.manual_seed(9)
    tensors[name] = torch.randn_like(tensors[name]) * 0.3
    save_file(tensors, other / "mtp.safetensors")
    runner.reload_weights(str(other))
    made.reference.eh_proj.weight.data, before = tensors[name], made.reference.eh_proj.weight.data
    told = Told(monkeypatch)
    try:
        assert engine.run(BATCH) == made.answers
        told.compare(made.reference, made.target)
    finally:
        made.reference.eh_proj.weight.data = before
    (other / "mtp.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks the tensors model\.layers\..*eh_proj"):
        runner.reload_weights(str(other))


@pytest.mark.parametrize("made", ["llama", "deepseek-v3"], indirect=True)
def test_a_quantized_checkpoint_has_a_quantized_mtp_layer(build_runner, monkeypatch, made, tmp_path):
    name = made.folder.name
    whole = tmp_path / "whole"
    shutil.copytree(made.folder, whole)
    tensors = load_file(whole / "model.safetensors") | load_file(whole / "mtp.safetensors")
    (whole / "mtp.safetensors").unlink()
    save_file(tensors, whole / "model.safetensors")
    if name == "llama":
        plain = awq(whole, tmp_path / "few", group=16, layers=(*QUANTIZED, "eh_proj"))
    else:
        monkeypatch.setattr(fp8_config, "ActivationScheme", lambda **_: None)
        plain = fp8(whole, tmp_path / "few", layers=LATENT_LAYERS)
    target = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    reference = ReferenceMtp(target, *LAYERS[name], recycles_normed=True)
    reference.read(load_file(plain / "model.safetensors"))
    told = Told(monkeypatch)
    engine = drafting(build_runner, monkeypatch, tmp_path / "few")
    told.seen.clear()
    engine.run(BATCH)
    told.compare(reference, target)


@pytest.mark.parametrize("asked", [{"spec_tokens": 3}, {"spec_method": "auto"}, {"spec_method": "deepseek_mtp"}])
@pytest.mark.req("SD-18")
def test_a_checkpoint_with_an_mtp_layer_needs_no_method(made, asked):
    found = EngineArgs(model=str(made.folder), device="cpu", **asked).config()
    assert found.speculative is not None and found.speculative.method == "mtp" and found.speculative.model is None
    assert found.scheduler.num_lookahead_tokens == found.speculative.num_speculative_tokens == asked.get("spec_tokens", 4)


def test_a_checkpoint_without_one(checkpoint, made, tmp_path):
    args = EngineArgs(model=str(checkpoint("llama")), device="cpu")
    with pytest.raises(ConfigError, match=r"the method mtp needs a checkpoint with an MTP layer, and .* has none"):
        msgspec.structs.replace(args, spec_method="mtp").config()
    with pytest.raises(ConfigError, match="method is missing"):
        msgspec.structs.replace(args, spec_tokens=2).config()
    with pytest.raises(ConfigError, match="model is for draft_model, eagle, eagle3, not for mtp"):
        EngineArgs(model=str(made.folder), device="cpu", spec_method="mtp", spec_model=str(made.folder)).config()
    other = tmp_path / "promised"
    shutil.copytree(checkpoint("llama"), other)
    config = json.loads((other / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (other / "config.json").write_text(json.dumps(config))
    found = EngineArgs(model=str(other), device="cpu", spec_method="auto").config()
    assert found.speculative is not None and found.speculative.method == "suffix"
    (other / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": "one"}))
    with pytest.raises(ConfigError, match="num_nextn_predict_layers must be a positive whole number, not 'one'"):
        EngineArgs(model=str(other), device="cpu").config()
