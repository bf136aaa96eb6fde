"""Models of shapes that nobody chose, from checkpoints in one file or many and with the configuration in either spelling: logits
and greedy tokens are those of transformers."""

import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import LLAMA3_ROPE, MAX_MODEL_LEN

from penstock.engine.sampling import SamplingParams

THETA = {"rope_theta": 20000.0}
SCALINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (MAX_MODEL_LEN, {}),
    "linear": (MAX_MODEL_LEN // 4, {"factor": 4.0}),
    "dynamic": (MAX_MODEL_LEN // 5, {"factor": 5.0}),
    "yarn": (MAX_MODEL_LEN, {"factor": 4.0, "original_max_position_embeddings": MAX_MODEL_LEN // 4}),
    "llama3": (MAX_MODEL_LEN, LLAMA3_ROPE),
    "longrope": (MAX_MODEL_LEN, {"original_max_position_embeddings": 64}),
}
"""`max_position_embeddings`, and what `rope_parameters` says besides."""
CASES = [
    *[("Llama", scaling) for scaling in SCALINGS],
    *[(family, scaling) for family in ("Mistral", "Qwen2", "Qwen3", "Olmo2") for scaling in ("default", "yarn")],
    *[("Phi3", scaling) for scaling in ("default", "longrope")],
    *[(family, "default") for family in ("Gemma2", "Gemma3")],
    ("Gemma3", "linear"),
]
OUTPUTS = 6


def drawn(family: str, scaling: str, rng: random.Random) -> dict[str, Any]:
    """A configuration; of heads of 80 or 96 elements at times, seven to a key, with odd vocabularies, tied or not."""
    kv_heads = rng.choice([1, 2])
    head_size = rng.choice([16, 24, 80, 96])
    positions, extra = SCALINGS[scaling]
    rope = {"rope_type": scaling, **THETA, **extra}
    if scaling == "longrope":
        rope |= {name: [rng.uniform(1, 6) for _ in range(head_size // 2)] for name in ("short_factor", "long_factor")}
    fields: dict[str, Any] = {
        "vocab_size": rng.choice([193, 257, 331]),
        "hidden_size": rng.choice([28, 56, 84]),  # a multiple of any number of heads
        "intermediate_size": rng.choice([24, 88, 112]),
        "num_hidden_layers": rng.choice([2, 3, 4]),
        "num_attention_heads": kv_heads * rng.choice([1, 2, 7]),
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": positions,
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": rope,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family in ("Phi3", "Qwen2", "Olmo2"):  # their heads are the width's share
        fields["hidden_size"] = head_size * fields["num_attention_heads"]
        del fields["head_dim"]
    if family == "Llama":
        fields |= {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    if family in ("Mistral", "Gemma2", "Gemma3"):
        fields["sliding_window"] = rng.choice([17, 40, 100])
    if family.startswith("Gemma"):
        fields |= {"query_pre_attn_scalar": rng.choice([16, 30]), "tie_word_embeddings": True}
    if family == "Gemma3":
        fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}
        fields["sliding_window_pattern"] = 2
        fields["max_position_embeddings"] = MAX_MODEL_LEN
    if family == "Phi3":
        fields |= {"pad_token_id": 0} | ({"original_max_position_embeddings": 64} if scaling == "longrope" else {})
    return fields


def as_before_transformers_5(path: Path, to: Path, **more: Any) -> Path:
    """A copy whose config.json is spelled as it was then."""
    shutil.copytree(path, to)
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    (to / "config.json").write_text(json.dumps(config | more))
    return to


@pytest.mark.parametrize(("family", "scaling"), CASES)
@torch.no_grad()
def test_any_shape_has_transformers_logits(family, scaling, tmp_path, build_runner, driver):
    transformers = pytest.importorskip("transformers")
    seed = zlib.crc32(f"{family} {scaling}".encode())
    rng = random.Random(seed)
    fields = drawn(family, scaling, rng)
    torch.manual_seed(seed)
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, name)(**fields))
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    model.set_attn_implementation("eager")
    path = tmp_path / "new"
    model.float().eval().save_pretrained(path, max_shard_size="40KB" if rng.random() < 0.5 else "1GB")
    sharded = (path / "model.safetensors.index.json").exists()
    assert sharded == (len(list(path.glob("*.safetensors"))) > 1)
    if rng.random() < 0.5:
        pattern = {"sliding_window_pattern": 2} if family == "Gemma3" else {}
        path = as_before_transformers_5(path, tmp_path / "old", **pattern)

    play, vocab = driver(build_runner(path)), fields["vocab_size"]
    # As long as can be: frequencies that depend on the length are then those of both.
    tokens = np.random.default_rng(seed % 1000).integers(0, vocab, MAX_MODEL_LEN).tolist()
    expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), -1)
    sequence = play.admit(tokens, SamplingParams(max_tokens=1, temperature=0.0, logprobs=vocab))
    play.step([(sequence, 111)])
    found = play.step([(sequence, MAX_MODEL_LEN - 111)]).logprobs
    logprobs = torch.empty(vocab)
    logprobs[torch.tensor(found.top_ids[0]).long()] = torch.tensor(found.top_logprobs[0])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-5, msg=lambda text: f"{fields}: {text}")
    if scaling != "dynamic":
        inputs = torch.tensor([tokens[:150]])
        options = {"attention_mask": torch.ones_like(inputs), "pad_token_id": 0, "do_sample": False, "max_new_tokens": OUTPUTS}
        greedy = model.generate(inputs, **options)[0, 150:].tolist()
        assert play.generate(play.admit(tokens[:150]), OUTPUTS) == greedy, fields


def test_the_shapes_have_what_is_rare_among_them():
    """The draws are the same in every run."""
    shapes = [drawn(family, scaling, random.Random(zlib.crc32(f"{family} {scaling}".encode()))) for family, scaling in CASES]
    heads = {shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"]) for shape in shapes}
    groups = {shape["num_attention_heads"] // shape["num_key_value_heads"] for shape in shapes}
    assert {80, 96} <= heads and 7 in groups and {shape["tie_word_embeddings"] for shape in shapes} == {True, False}
