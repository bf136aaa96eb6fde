"""Adapters for the decoder of a model that reads images, under the names that transformers has for its modules."""

import json

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.config import ConfigError
from penstock.engine.lora.checkpoint import Target, read_adapter

MODULE = "layers.0.self_attn.q_proj"


@pytest.mark.parametrize("ours", [f"model.{MODULE}", f"language_model.model.{MODULE}"])
@pytest.mark.parametrize("before", ["model.language_model.", None])
def test_a_decoders_modules_are_found_by_either_name(tmp_path, ours, before):
    name = ours if before is None else before + MODULE
    a, b = torch.ones(2, 8), torch.ones(4, 2)
    weights = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    found = read_adapter(tmp_path, {ours: Target((4, 8), lambda first, second: (first, second))}, 16)
    assert list(found) == [ours]
    assert torch.equal(found[ours].a, a)
    with pytest.raises(ConfigError, match="the model has no"):
        read_adapter(tmp_path, {f"visual.{MODULE}": Target((4, 8), lambda first, second: (first, second))}, 16)
