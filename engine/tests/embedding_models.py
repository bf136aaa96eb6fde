"""Checkpoints as sentence-transformers saves them, and what it computes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MODES = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "first": "pooling_mode_cls_token"}
_EVERY_MODE = (*MODES.values(), "pooling_mode_max_tokens", "pooling_mode_weightedmean_tokens")


def write_modules(path: Path, mode: str, size: int, normalize: bool = True, **pooling: Any) -> Path:
    """Puts `modules.json` and what it names beside a checkpoint; `mode` is a flag of the pooling's configuration."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    flags = {name: name == mode for name in _EVERY_MODE}
    config = {"word_embedding_dimension": size, **flags, "include_prompt": True, **pooling}
    (path / "1_Pooling/config.json").write_text(json.dumps(config))
    return path


def reference(model: Any, tokens: list[int], mode: str) -> npt.NDArray[np.float32]:
    """What transformers' model without a head gives for a text, pooled: [hidden]."""
    with torch.inference_mode():
        hidden = model(torch.tensor([tokens])).last_hidden_state[0]
    pooled = {"last": hidden[-1], "mean": hidden.mean(0), "first": hidden[0]}[mode]
    return pooled.float().numpy()
