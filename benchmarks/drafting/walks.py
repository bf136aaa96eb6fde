"""A Llama of 12.6 M parameters whose next token follows from the last one alone, with heads and a draft model of which it is
known how often they are right.

Its layers compute what any Llama's do, and then add nothing to the residual stream. So a token's logits are those of its
embedding, and the LM head's row for the token after it is that embedding. A greedy answer walks along one circle through the
vocabulary.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from drafting.workloads import MODEL

VOCAB, SPECIAL = 4096, 16
SHAPE = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}


def circle() -> np.ndarray:
    """[VOCAB]: the token after each."""
    order = np.random.default_rng(0).permutation(np.arange(SPECIAL, VOCAB))
    following = np.roll(np.arange(VOCAB), -1)
    following[order] = np.roll(order, -1)
    return following


def walk(start: int, length: int) -> list[int]:
    """The answer after a token, which it begins with; tokens count on from the last one to the first."""
    following, found = circle(), [start if start < VOCAB else SPECIAL + start % (VOCAB - SPECIAL)]
    while len(found) < length:
        found.append(int(following[found[-1]]))
    return found


def make_model(folder: Path, *, small: bool = False) -> Path:
    """The checkpoint; or, with one layer of a quarter of the width, a draft model that is always right."""
    shape, layers = (SMALL, 1) if small else (SHAPE, 6)
    embedding = _embedding(shape["hidden_size"])
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(shape["hidden_size"])}
    # The row of each token is the embedding of the one before it.
    tensors["lm_head.weight"] = embedding[torch.from_numpy(np.argsort(circle()))]
    for layer in range(layers):
        tensors |= {f"model.layers.{layer}.{name}": value for name, value in _layer(shape).items()}
    return _save(folder, tensors, {**shape, "num_hidden_layers": layers})


def make_head(folder: Path, share: float) -> Path:
    """An EAGLE head that proposes the right token after that share of all tokens, and a wrong one after the others."""
    hidden = SHAPE["hidden_size"]
    embedding, rng = _embedding(hidden), np.random.default_rng(1)
    wrong = torch.from_numpy(rng.random(VOCAB) >= share)
    seen = torch.where(wrong[:, None], embedding.roll(1, 0), embedding)
    tensors = {"embed_tokens.weight": seen, "fc.weight": torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)}
    tensors |= {f"layers.0.{name}": value for name, value in _layer(SHAPE).items() if name != "input_layernorm.weight"}
    return _save(folder, tensors, {**SHAPE, "num_hidden_layers": 1})


def _embedding(hidden: int) -> torch.Tensor:
    return torch.randn(VOCAB, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()


def _layer(shape: dict[str, int]) -> dict[str, torch.Tensor]:
    """Weights of a decoder layer that adds nothing."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = shape["num_attention_heads"] * shape["head_dim"], shape["num_key_value_heads"] * shape["head_dim"]
    rng = torch.Generator().manual_seed(2)
    sizes = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden)}
    sizes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    return {
        **{f"{name}.weight": torch.randn(size, generator=rng) * 0.02 for name, size in sizes.items()},
        "self_attn.o_proj.weight": torch.zeros(hidden, queries),
        "mlp.down_proj.weight": torch.zeros(hidden, inner),
        "input_layernorm.weight": torch.ones(hidden),
        "post_attention_layernorm.weight": torch.ones(hidden),
    }


def _save(folder: Path, tensors: dict[str, torch.Tensor], fields: dict[str, int]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    save_file(
        {name: value.bfloat16().contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, folder)
    return folder
