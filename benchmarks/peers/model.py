"""The benchmarks' models: random Llamas in bf16 with the demo model's tokenizer, as a rule one of 12.6 M parameters.

One is kept beside the peers, under its digest, so that what they make of it (exports, compiled code) is made once.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from peers.install import CACHE
from peers.loop import VOCAB

TOKENIZER = Path(__file__).parents[2] / "examples/models/penstock-tiny"
Shape = Mapping[str, int]
SMALL: Shape = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def make_model(shape: Shape = SMALL) -> Path:
    """The folder of the checkpoint."""
    models = CACHE / "models"
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models) as folder:
        _make(Path(folder) / "made", shape)
        digest = hashlib.sha256((Path(folder) / "made/model.safetensors").read_bytes()).hexdigest()
        target = models / digest[:16] / "checkpoint"
        if not target.is_dir():
            target.parent.mkdir(exist_ok=True)
            (Path(folder) / "made").rename(target)
    return target


def made_of(model: Path, name: str, command: Callable[[Path], Sequence[str | Path]]) -> Path | str:
    """Another form of the checkpoint, beside it: made by a command on the first call. Or what the command said as it failed.

    Args:
        model: The checkpoint.
        name: Of the other form's file or folder.
        command: Given where it shall write.
    """
    target = model.with_name(name)
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command(Path(folder) / name), capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            return f"{name} cannot be made: {done.stderr.strip().splitlines()[-1:]}"
        (Path(folder) / name).rename(target)
    return target


def _make(path: Path, shape: Shape) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=2048, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, path)
