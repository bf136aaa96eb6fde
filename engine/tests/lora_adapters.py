"""Random adapters in PEFT's format, and models with their weights merged, for comparison."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def weights_of(model, modules: tuple[str, ...]) -> dict[str, torch.nn.Linear]:
    """The linear layers of a transformers model that end in one of these names."""
    return {name: layer for name, layer in model.named_modules() if name.rpartition(".")[2] in modules}


def make_adapter(
    path: Path, model, *, rank: int = 4, seed: int = 0, modules: tuple[str, ...] = ALL, scale: float = 0.3, **config
) -> Path:
    """Writes an adapter whose factors are random; `config` is added to adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in weights_of(model, modules).items():
        out_features, in_features = layer.weight.shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * scale
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * scale
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(said | config))
    return path


@torch.no_grad()
def merged(model, path: Path):
    """Adds an adapter to a transformers model's weights, as the paper has it: W + (α / r) · B · A; returns the model."""
    from safetensors.torch import load_file

    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    layers = dict(model.named_modules())
    for key in [key for key in tensors if key.endswith("lora_A.weight")]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[key].double(), tensors[key.replace("lora_A", "lora_B")].double()
        divisor = a.shape[0] ** 0.5 if config.get("use_rslora") else a.shape[0]
        weight = layers[module].weight
        weight.copy_((weight.double() + config["lora_alpha"] / divisor * (b @ a)).to(weight.dtype))
    return model
