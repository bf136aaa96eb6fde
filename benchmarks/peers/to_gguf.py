"""A checkpoint of a Llama or a Qwen3-MoE as a GGUF file for llama.cpp. Usage: to_gguf MODEL TARGET [KIND]

KIND is a GGUF type, such as Q8_0, for the matrices of layers; without it they keep bf16, as all else does.
Runs in the environment of llama.cpp, which has no torch: bf16 stays as raw bytes.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}
"""Of GGUF, by model type."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The weights of a safetensors file, all bf16, as uint16 of the same shapes."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    weights: dict[str, np.ndarray] = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        begin, end = (8 + size + at for at in entry["data_offsets"])
        weights[name] = np.frombuffer(data[begin:end], np.uint16).reshape(entry["shape"])
    return _stacked(weights)


def _stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With the matrices of all experts of a layer as one."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name in [name for name in weights if _EXPERT.search(name)]:
        (number,) = _EXPERT.findall(name)
        experts.setdefault(_EXPERT.sub(".experts.", name), {})[int(number)] = weights.pop(name)
    return weights | {name: np.stack([of[number] for number in sorted(of)]) for name, of in experts.items()}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order: the two halves that RoPE turns together lie side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def rename(name: str) -> str:
    """A weight's name in GGUF."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_NAMES[part]}.weight"
    return f"{_NAMES[stem]}.weight"


def add_weights(writer: GGUFWriter, model: Path, config: dict[str, Any], kind: GGMLQuantizationType) -> None:
    """Matrices of layers as `kind`, other matrices as bf16, and norms and routers as fp32, which llama.cpp insists on."""
    # Other families turn halves of a head in llama.cpp, too.
    llama = config["model_type"] == "llama"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]} if llama else {}
    for name, weight in tensors(model / "model.safetensors").items():
        if weight.ndim == 1 or name.endswith("mlp.gate.weight"):
            writer.add_tensor(rename(name), (weight.astype(np.uint32) << 16).view(np.float32))
            continue
        part = name.split(".")[-2]
        ordered = interleave(weight, heads[part]) if part in heads else weight
        if ".layers." in name and kind is not GGMLQuantizationType.BF16:
            wide = (ordered.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(rename(name), quantize(wide, kind), raw_dtype=kind)
            continue
        raw = np.ascontiguousarray(ordered).view(np.uint8)
        writer.add_tensor(rename(name), raw, raw_dtype=GGMLQuantizationType.BF16)


def add_tokenizer(writer: GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    """A byte-level BPE."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    for name, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        if config[name] is not None:
            add(config[name])
    writer.add_add_bos_token(False)


def main() -> None:
    """Writes the file."""
    model, target, kind = Path(sys.argv[1]), Path(sys.argv[2]), (*sys.argv[3:], "BF16")[0]
    config = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(target, _ARCHITECTURES[config["model_type"]])
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_tokenizer(writer, model, config)
    add_weights(writer, model, config, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
