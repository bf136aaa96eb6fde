"""What `penstock warm` has compiled is all that serving launches."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.runner.device.warm import shapes
from penstock.engine.warm import warm

pytestmark = pytest.mark.slow

FLAGS = ["--max-num-seqs", "6", "--max-num-batched-tokens", "48", "--max-model-len", "200", "--block-size", "16"]
FLAGS += ["--enable-lora", "--max-lora-rank", "8"]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 3000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 400,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def run(cache: Path, *command: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_warm_cache_has_every_kernel_that_serving_launches(model, tmp_path):
    warming = ("-m", "penstock.cli", "warm", str(model), "--arch", "sm_90", "--cache", str(tmp_path), *FLAGS)
    first = run(tmp_path / "elsewhere", *warming)
    counts = re.search(r"(\d+) compiled, (\d+) were in the cache", first)
    assert counts is not None and int(counts[1]) > 5 and int(counts[2]) == 0, first
    assert "paged_attention" in first and "_rms_norm_kernel" in first
    assert not (tmp_path / "elsewhere").exists(), "the flag decides where the cache is"
    assert "_lora_expand_kernel" in first
    served = json.loads(run(tmp_path, str(Path(__file__).with_name("warm_serving.py")), str(model), *FLAGS))
    assert {"_rms_norm_kernel", "_lora_shrink_kernel", "penalise_kernel"} <= set(served["launched"])
    assert served["compiled"] == [], "everything is in the cache"


def test_steps_of_every_kind_are_launched():
    found = shapes(100, 3000)
    assert {(1, 0), (16, 0), (17, 0), (100, 0), (63, 0), (64, 0), (65, 0), (0, 1), (0, 3000), (0, 2048)} <= set(found)
    assert any(shape.decodes and shape.prompt for shape in found)
    assert all(shape.decodes <= 100 and shape.decodes + shape.prompt <= 3000 for shape in found)
    assert {(63, 4), (32, 16)} <= set(found), "drafts beside decodes"
    assert shapes(1, 1) == [(1, 0), (0, 1)]


def test_what_cannot_be_done_is_said(model, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert warm([str(model)]) == 2 and "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    assert warm([str(model), "--arch", "sm_12"]) == 2
    assert "unknown architecture 'sm_12' (known: sm_80" in capsys.readouterr().err
    assert warm([str(model / "nowhere")]) == 2
    assert warm([str(model), "--cache", str(model / "config.json" / "x")]) == 2
    assert "config.json/x: " in capsys.readouterr().err
