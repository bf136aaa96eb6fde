"""What a load takes of memory, looked at from outside of the process."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.process import build_executor
from penstock.engine.core.memory import Memory, check_weights_fit
from penstock.engine.quant.scheme import CheckpointQuantization

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from procfs import memory_bytes

pytestmark = pytest.mark.slow

LAYERS, HIDDEN, INNER, VOCAB = 8, 1024, 4096, 256
STACKS = 2**25
"""Bytes that threads reserve, and hardly use."""
LOAD = """
import sys
from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.process import build_executor
from penstock.engine.core.memory import Memory, check_weights_fit
from penstock.engine.quant.scheme import CheckpointQuantization
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


def describe(folder: Path, layers: int, hidden: int, inner: int) -> None:
    """Writes the config.json of a Llama in bfloat16."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
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


def written(folder: Path, layers: int) -> Path:
    """A Llama of random weights, a file for each layer."""
    describe(folder, layers, HIDDEN, INNER)
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


@pytest.mark.parametrize("scheme", [None, "int4_per_group_32", "fp8_per_block"])
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
        limit = memory_bytes(process.pid, "VmData") + int(most) + STACKS  # the kernel gives no more, beside files
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit, limit))
        print("go", file=process.stdin, flush=True)
        assert process.stdout.readline() == "loaded\n"
        taken = memory_bytes(process.pid, "VmHWM") - before
        print("go", file=process.stdin, flush=True)
    assert process.returncode == 0
    assert taken <= most
    assert scheme is None or most < sum(sizes), "the weights in 16 bits would be more"
    assert taken > 0.9 * cost.layer_weight_bytes, "it is all there"


@pytest.mark.parametrize("worker", [False, True])
def test_weights_beyond_the_memory_are_refused_before_a_file_is_opened(worker, tmp_path):
    """Petabytes: no layer is made, and the file is not one of safetensors, which nobody finds out."""
    describe(tmp_path / "vast", 1000, 2**19, 2**20)
    (tmp_path / "vast" / "model.safetensors").write_bytes(b"not read")
    args = EngineArgs(model=str(tmp_path / "vast"), worker_process=worker, max_model_len=16)
    arithmetic = (
        r"the weights do not fit: layers of 5,497,558,138,880,000 bytes \+ an LM head of 268,435,456 = 5,497,558,407,315,456 "
        r"bytes \(bfloat16\), and of [0-9,]+ bytes of memory [0-9,]+ are free before anything is loaded$"
    )
    with pytest.raises(ConfigError, match=arithmetic):
        build_executor(args.config("cpu"))


def test_weights_fit_up_to_the_last_byte_as_they_will_be_stored(checkpoints):
    large = str(checkpoints[1])
    for scheme, each in ((None, 2.0), ("int4_per_group_32", 0.5625), ("fp8_per_block", 1.03125)):
        model = EngineArgs(model=large, dtype="bfloat16", quantization=scheme).config("cpu").model
        needed = int(each * LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)) + 2 * HIDDEN * VOCAB
        check_weights_fit(model, 10**15, Memory(needed, needed, 0))
        with pytest.raises(ConfigError, match=rf"= {needed:,} bytes \(bfloat16.*\), and of .* {needed - 1:,} are free"):
            check_weights_fit(model, 0, Memory(1, needed - 1, 0))
    found = CheckpointQuantization(method="fp8", rules=())
    model = msgspec.structs.replace(model, quantization=None, stored_quantization=found)
    check_weights_fit(model, 1000, Memory(1000, 1000, 0))
    with pytest.raises(ConfigError, match=r"the checkpoint's files have 1,000 bytes \(fp8\), and of 2,000 .* 999 are free"):
        check_weights_fit(model, 1000, Memory(2000, 999, 0))
