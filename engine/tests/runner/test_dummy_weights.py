"""Models without a checkpoint: made-up weights, and the shapes that benchmarks use."""

import hashlib
from pathlib import Path

import pytest
import torch

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError
from penstock.engine.loading import dummy
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.loading.dummy import dummy_tensor
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.runner.model_runner import ModelRunner

SHAPES = Path(__file__).parents[3] / "benchmarks/shapes"
CPU = torch.device("cpu")
BLOCKS = 320
"""That `driver` counts on."""


def hashed(key: str, index: int) -> float:
    """lowbias32 in Python's integers, from -1 to 1."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    x = (index + int.from_bytes(digest[:4], "little")) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ int.from_bytes(digest[4:], "little")
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    x ^= x >> 16
    return (x - 2**32 if x >= 2**31 else x) / 2**31


def test_a_tensor_is_a_function_of_its_name_and_shape_alone(monkeypatch):
    value = dummy_tensor("model.layers.0.mlp.up_proj.weight", (300, 200), torch.float32, CPU)
    assert torch.equal(value, dummy_tensor("model.layers.0.mlp.up_proj.weight", (300, 200), torch.float32, CPU))
    assert not torch.equal(value, dummy_tensor("model.layers.1.mlp.up_proj.weight", (300, 200), torch.float32, CPU))
    expected = [hashed("model.layers.0.mlp.up_proj.weight/0", index) * (3 / 200) ** 0.5 for index in range(400)]
    torch.testing.assert_close(value[:2].flatten().double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    monkeypatch.setattr(dummy, "_CHUNK", 1000)
    chunked = dummy_tensor("model.layers.0.mlp.up_proj.weight", (300, 200), torch.float32, CPU)
    assert len({row.sum().item() for row in chunked.view(-1, 1000)}) == 60, "no chunk repeats another"


def test_matrices_keep_the_size_of_what_passes_norms_are_near_1_and_biases_near_0():
    matrix = dummy_tensor("w.weight", (400, 256), torch.bfloat16, CPU).float()
    assert matrix.std().item() == pytest.approx(1 / 16, rel=0.02) and abs(matrix.mean().item()) < 0.001
    assert abs(torch.corrcoef(torch.stack([matrix[:-1].flatten(), matrix[1:].flatten()]))[0, 1].item()) < 0.02
    norm, bias = (dummy_tensor(name, (4096,), torch.float32, CPU) for name in ("norm.weight", "q_proj.bias"))
    assert 0.9 <= norm.min() < 0.91 and 1.09 < norm.max() <= 1.1
    assert bias.abs().max() <= 0.02 and bias.std() > 0.01


@pytest.mark.gpu
def test_a_device_makes_the_same_bits():
    for shape in ((3000, 1024), (4097,)):
        there = dummy_tensor("some.weight", shape, torch.bfloat16, torch.device("cuda"))
        assert torch.equal(there.cpu(), dummy_tensor("some.weight", shape, torch.bfloat16, CPU))


@pytest.mark.parametrize(
    ("shape", "parameters", "kv_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("qwen3-0.6b", 596_049_920, 114_688),
        ("qwen3-8b", 8_190_735_360, 147_456),
        ("qwen3-14b", 14_768_307_200, 163_840),
    ],
)
def test_the_shapes_are_those_of_the_models_that_they_are_named_after(shape, parameters, kv_bytes):
    decoder = parse_decoder_config(read_object(SHAPES / shape / "config.json"))
    model = read_model_config(SHAPES / shape, served_names=(), load_format="dummy")
    assert model.dtype == "bfloat16" and model.cost is not None
    assert sum(group.kv_bytes_per_token for group in model.cost.windows) == kv_bytes
    embedding = decoder.vocab_size * decoder.hidden_size
    norms = 2 * decoder.num_layers * decoder.hidden_size + decoder.hidden_size
    norms += 2 * decoder.head_size * decoder.num_layers if decoder.qk_norm else 0
    weights = model.cost.layer_weight_bytes // 2 + embedding * (1 if decoder.tie_word_embeddings else 2) + norms
    assert weights == parameters
    with pytest.raises(ConfigError, match=r"has no \*.safetensors file"):
        read_model_config(SHAPES / shape, served_names=())


def test_an_engine_runs_on_made_up_weights_and_makes_the_same_again(checkpoint, driver, tmp_path):
    """No file of weights is there; `driver` fills the cache with NaN first, so that any of them would show."""
    (tmp_path / "config.json").write_bytes((checkpoint("qwen3") / "config.json").read_bytes())
    arguments = EngineArgs(model=str(tmp_path), load_format="dummy", dtype="float32", num_gpu_blocks_override=BLOCKS)
    runner = ModelRunner(arguments.config())
    runner.load()

    def answer():
        runner.initialize_kv_cache(BLOCKS)
        play = driver(runner)
        return list(play.generate(play.admit([5, 9, 200, 31]), 8))

    expected = answer()
    assert len(set(expected)) > 1, "the model answers with more than one token"
    runner.sleep(2)
    runner.wake_up(["weights", "kv_cache"])
    runner.reload_weights(None)
    assert answer() == expected
    runner.reload_weights(str(checkpoint("qwen3")))
    assert answer() != expected, "a checkpoint's weights take their place"
