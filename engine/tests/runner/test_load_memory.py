"""What a load takes of memory, looked at from outside of the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.args import EngineArgs

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from procfs import memory_bytes

LAYERS, HIDDEN, INNER, VOCAB = 8, 1024, 4096, 256
LOAD = """
import sys
from penstock.engine.args import EngineArgs
from penstock.engine.runner.model_runner import ModelRunner

def load(path):
    args = EngineArgs(model=path, dtype="bfloat16", quantization=sys.argv[3] or None, max_model_len=16)
    runner = ModelRunner(args.config("cpu"))
    runner.load()
    return runner

load(sys.argv[1])
print("warm", flush=True)
sys.stdin.readline()
kept = load(sys.argv[2])
print("loaded", flush=True)
sys.stdin.readline()
"""


def written(folder: Path, layers: int) -> Path:
    """A Llama of random weights in bfloat16, a file for each layer."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    square, wide = torch.randn(HIDDEN, HIDDEN).bfloat16(), torch.randn(INNER, HIDDEN).bfloat16()
    norm = torch.ones(HIDDEN).bfloat16()
    body = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN).bfloat16(), "model.norm.weight": norm}
    save_file(body, folder / "model-body.safetensors")
    for at in range(layers):
        tensors = {f"self_attn.{name}_proj": square for name in "qkvo"} | {"mlp.gate_proj": wide, "mlp.up_proj": wide}
        tensors |= {"mlp.down_proj": wide.T, "input_layernorm": norm, "post_attention_layernorm": norm}
        named = {f"model.layers.{at}.{name}.weight": value.contiguous().clone() for name, value in tensors.items()}
        save_file(named, folder / f"model-{at}.safetensors")
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    return written(folder / "small", 1), written(folder / "large", LAYERS)


@pytest.mark.parametrize("scheme", [None, "int4_per_group_32", "fp8_per_tensor", "fp8_per_block"])
def test_a_load_takes_little_more_than_the_model_and_one_file(scheme, checkpoints):
    """At most 1.15 times the model as it is stored, and a file of the checkpoint."""
    small, large = map(str, checkpoints)
    sizes = [file.stat().st_size for file in checkpoints[1].glob("*.safetensors")]
    cost = EngineArgs(model=large, dtype="bfloat16", quantization=scheme).config("cpu").model.cost
    assert cost is not None
    most = 1.15 * (cost.layer_weight_bytes + cost.lm_head_bytes) + max(sizes)
    command = [sys.executable, "-c", LOAD, small, large, scheme or ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "warm\n"
        before = memory_bytes(process.pid)
        print("go", file=process.stdin, flush=True)
        assert process.stdout.readline() == "loaded\n"
        taken = memory_bytes(process.pid, "VmHWM") - before
        print("go", file=process.stdin, flush=True)
    assert process.returncode == 0
    assert taken <= most
    assert scheme is None or most < sum(sizes), "the weights in 16 bits would be more"
    assert taken > cost.layer_weight_bytes, "it is all there"
