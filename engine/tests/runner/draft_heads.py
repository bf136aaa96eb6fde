"""Checkpoints of draft heads, and what they draft by plain torch over whole sequences."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import LLAMA, MAX_MODEL_LEN
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from penstock.engine.runner.draft_head import HeadProposer

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
        lm_head = self.lm_head if self.eagle3 else target.lm_head
        return iterate(self._pass, lm_head, known[1:], hidden, count, self.d2t if self.eagle3 else None)

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


class ReferenceMtp(torch.nn.Module):
    """The MTP layer of a target as DeepSeek-V3's report has it: a decoder layer of the target's kind after the last one."""

    def __init__(self, target, layer, norm, *, recycles_normed: bool) -> None:
        super().__init__()
        torch.manual_seed(8)
        hidden, eps = target.config.hidden_size, target.config.rms_norm_eps
        self.enorm, self.hnorm, self.shared_norm = (norm(hidden, eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layer, self.recycles_normed = layer(target.config, target.config.num_hidden_layers - 1), recycles_normed
        for name, parameter in self.named_parameters():
            torch.nn.init.normal_(parameter, 0.5 if "norm" in name else 0.0, 0.3)

    def save(self, target: Path, folder: Path, **fields) -> Path:
        """The target's checkpoint with this layer in it."""
        shutil.copytree(target, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1} | fields))
        before = f"model.layers.{config['num_hidden_layers']}."
        own = {name: value for name, value in self.state_dict().items() if not name.startswith("layer.")}
        own["shared_head.norm.weight"] = own.pop("shared_norm.weight")
        own |= self.layer.state_dict()
        for copy in ("embed_tokens.weight", "shared_head.head.weight"):
            own[copy] = torch.zeros(config["vocab_size"], config["hidden_size"])
        save_file({before + name: value.contiguous() for name, value in own.items()}, folder / "mtp.safetensors")
        return folder

    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the layer's weights from a whole checkpoint."""
        (before,) = (name.removesuffix("enorm.weight") for name in tensors if name.endswith("enorm.weight"))
        for name, parameter in self.named_parameters():
            parameter.data = tensors[before + name.removeprefix("layer.").replace("shared_norm", "shared_head.norm")]

    @torch.inference_mode()
    def drafts(self, target, known: list[int], count: int) -> tuple[list[int], float]:
        """Return the drafts."""
        hidden = target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1]
        return iterate(lambda ids, states: self._pass(target.model, ids, states), target.lm_head, known[1:], hidden, count)

    def _pass(self, body, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded, length, layer = body.embed_tokens(ids), ids.shape[1], self.layer
        embedded[:, 0] = 0
        angles = body.rotary_emb(embedded, torch.arange(length)[None])
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        x = x + layer.self_attn(layer.input_layernorm(x), position_embeddings=angles, attention_mask=mask)[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out = self.shared_norm(x)
        return out, out if self.recycles_normed else x


def iterate(run, lm_head, ids: list[int], hidden: torch.Tensor, count: int, offsets=None) -> tuple[list[int], float]:
    """So many drafts, and the least lead of any over the second best.

    Args:
        run: A pass over all entries: ids and states to what the LM head takes and what the next pass takes.
        lm_head: Of its vocabulary.
        ids: After each entry's position.
        hidden: The states of the entries.
        count: Of the drafts.
        offsets: From the LM head's ids to the target's.
    """
    found, lead = [], float("inf")
    for _ in range(count):
        out, recycled = run(torch.tensor([ids]), hidden)
        best = lm_head(out[0, -1]).topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        token = int(best.indices[0])
        found.append(token if offsets is None else token + int(offsets[token]))
        ids, hidden = [*ids, found[-1]], torch.cat((hidden, recycled[:, -1:]), dim=1)
    return found, lead


class Told:
    """What a head was asked for, and what it has drafted."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        propose = HeadProposer.propose

        def watched(proposer, table, rows, known, most):
            drafts = propose(proposer, table, rows, known, most)
            for at, row in enumerate(rows.tolist()):
                self.seen.append((table.token_ids[row, : known[at]].tolist(), drafts[at][drafts[at] >= 0].tolist()))
            return drafts

        monkeypatch.setattr(HeadProposer, "propose", watched)

    def compare(self, reference: "ReferenceHead | ReferenceMtp", target) -> None:
        """Asserts that drafts are the reference's, of about 60 of the calls."""
        assert len(self.seen) > 60
        compared = 0
        for known, drafts in self.seen[:: max(len(self.seen) // 60, 1)]:
            expected, lead = reference.drafts(target, known, len(drafts))
            if lead > 1e-3:
                assert drafts == expected, len(known)
                compared += len(drafts)
        assert compared > 100


def save_head(folder: Path, tensors: dict[str, torch.Tensor], **fields) -> Path:
    """A checkpoint; `fields` go into its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**head_config().to_dict(), "architectures": ["LlamaForCausalLM"], **fields}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    save_file(tensors, folder / "model.safetensors")
    return folder
