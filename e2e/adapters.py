"""LoRA adapters of the demo model, and what kubectl says of them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from e2e import models
from e2e.cluster.cluster import Cluster
from penstock.api import labels

Object = dict[str, Any]
KIND = "loraadapter"
RANK = 4


def make(folder: Path) -> Path:
    """A random adapter of the demo model, strong enough to change what it says."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, weight in load_file(models.DEMO_MODEL / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            module, (out_features, in_features) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, in_features, generator=generator) * 0.3
            tensors[f"{module}.lora_B.weight"] = torch.randn(out_features, RANK, generator=generator) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}))
    return folder


def resource(model: str, name: str, uri: str) -> Object:
    """The LoraAdapter."""
    spec = {"modelRef": {"name": model}, "served": {"name": name}, "source": {"uri": uri}}
    head = {"apiVersion": f"{labels.GROUP}/{labels.VERSION}", "kind": "LoraAdapter"}
    return head | {"metadata": {"name": name}, "spec": spec}


def told(cluster: Cluster, namespace: str, name: str) -> tuple[str, dict[str, Object]]:
    """`status.ready`, and the conditions by type."""
    status = cluster.get(KIND, name, namespace).get("status")
    assert status, f"{name} has no status yet"
    return status["ready"], {it["type"]: it for it in status["conditions"]}
