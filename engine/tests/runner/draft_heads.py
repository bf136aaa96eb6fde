"""Checkpoints of draft heads, and what they draft by plain torch over whole sequences."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import LLAMA, MAX_MODEL_LEN
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

VOCAB = LLAMA["vocab_size"]
HIDDEN = LLAMA["hidden_size"]
DRAFT_VOCAB = 101
AUX = (0, 1)


def head_config(**fields) -> LlamaConfig:
    """Of a head's own layer; heads of another size than the target's."""
    own = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 1}
    return LlamaConfig(**(LLAMA | {"max_position_embeddings": MAX_MODEL_LEN, "initializer_range": 0.3} | own | fields))


class ReferenceHead(torch.nn.Module):
    """EAGLE-1, or EAGLE-3 with `eagle3`, as the papers' code has them."""

    def __init__(
        self,
        *,
        eagle3: bool,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        bias: bool = True,
        vocab: int = VOCAB,
    ):
        super().__init__()
        torch.manual_seed(7)
        config = head_config()
        config._attn_implementation = "eager"
        self.eagle3, self.norm_before_residual = eagle3, norm_before_residual
        self.embed_tokens = torch.nn.Embedding(vocab, HIDDEN)
        self.fc = torch.nn.Linear((len(AUX) if eagle3 else 2) * HIDDEN, HIDDEN, bias=bias)
        self.layer = LlamaDecoderLayer(config, 0)
        self.rotary = LlamaRotaryEmbedding(config)
        if eagle3:
            attention = self.layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(attention, name, torch.nn.Linear(2 * HIDDEN, getattr(attention, name).out_features, bias=False))
            self.hidden_norm, self.norm = LlamaRMSNorm(HIDDEN, config.rms_norm_eps), LlamaRMSNorm(HIDDEN, config.rms_norm_eps)
            self.lm_head = torch.nn.Linear(HIDDEN, DRAFT_VOCAB, bias=False)
            self.register_buffer("d2t", torch.arange(DRAFT_VOCAB))  # every second token: 2 i = i + i
            if norm_before_fc:
                self.input_norm = LlamaRMSNorm(len(AUX) * HIDDEN, config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            torch.nn.init.normal_(parameter, 0.5 if "norm" in name else 0.0, 0.3)

    def tensors(self, layer: str = "layers.0") -> dict[str, torch.Tensor]:
        """As checkpoints name them."""
        found = {name.replace("layer.", f"{layer}.", 1): value for name, value in self.state_dict().items()}
        found = {name: value for name, value in found.items() if not name.startswith("rotary.")}
        if self.eagle3:
            found[f"{layer}.hidden_norm.weight"] = found.pop("hidden_norm.weight")
            found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        else:
            del found[f"{layer}.input_layernorm.weight"]
        return {name: value.contiguous() for name, value in found.items()}

    @torch.inference_mode()
    def drafts(self, target: LlamaForCausalLM, known: list[int], count: int) -> tuple[list[int], float]:
        """So many drafts after the known tokens, and the least lead of any over the second best."""
        states = target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        if self.eagle3:
            hidden = torch.cat([states[layer] for layer in AUX], dim=-1)
            hidden = self.fc(self.input_norm(hidden) if hasattr(self, "input_norm") else hidden)
        else:
            hidden = states[-1]
        ids, found, lead = known[1:], [], float("inf")
        for _ in range(count):
            out, recycled = self._pass(torch.tensor([ids]), hidden)
            logits = self.lm_head(out[0, -1]) if self.eagle3 else target.lm_head(out[0, -1])
            best = logits.topk(2)
            lead = min(lead, float(best.values[0] - best.values[1]))
            token = int(best.indices[0])
            found.append(token + int(self.d2t[token]) if self.eagle3 else token)
            ids, hidden = [*ids, found[-1]], torch.cat((hidden, recycled[:, -1:]), dim=1)
        return found, lead

    def _pass(self, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded, length = self.embed_tokens(ids), ids.shape[1]
        angles = self.rotary(embedded, torch.arange(length)[None])
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        layer = self.layer
        if self.eagle3:
            state = self.hidden_norm(hidden)
            residual = state if self.norm_before_residual else hidden
            x = torch.cat((layer.input_layernorm(embedded), state), dim=-1)
        else:
            x = residual = self.fc(torch.cat((embedded, hidden), dim=-1))
        residual = residual + layer.self_attn(x, position_embeddings=angles, attention_mask=mask)[0]
        out = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return (self.norm(out), out) if self.eagle3 else (out, out)


def save_head(folder: Path, tensors: dict[str, torch.Tensor], **fields) -> Path:
    """A checkpoint; `fields` go into its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**head_config().to_dict(), "architectures": ["LlamaForCausalLM"], **fields}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    save_file(tensors, folder / "model.safetensors")
    return folder
