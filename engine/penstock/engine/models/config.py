"""The shape of a decoder, read from a checkpoint's `config.json`. No torch: the frontend reads it too.

Both spellings of Hugging Face's configuration are understood, as written before transformers 5 and since. What is not implemented
is refused by the name of its field.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.engine.config import ConfigError
from penstock.engine.models.expert_config import ExpertsConfig, parse_experts
from penstock.engine.models.fields import whole_number
from penstock.engine.models.latent_config import LatentConfig, parse_latent
from penstock.engine.models.nested import text_fields
from penstock.engine.models.registry import Family, family
from penstock.engine.models.rope import RopeConfig, Ropes, parse_ropes
from penstock.engine.models.vision.config import VisionConfig, parse_vision

Activation = Literal["silu", "gelu_tanh"]
Norm = Literal["rms", "layer", "layer_bias"]
"""RMSNorm, or LayerNorm without and with a bias."""
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_FURTHER = "num_nextn_predict_layers"


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of attention and MLPs; sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    norm_offset: float
    """What is added to the weight of every norm."""
    norm: Norm = "rms"
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: Activation
    gated_mlp: bool = True
    """Whether the MLP multiplies the activation by a second projection."""
    qk_norm: bool
    """Whether each head's queries and keys are normalised."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies what each sublayer adds to the residual stream."""
    logits_scale: float = 1.0
    attention_scale: float
    latent: LatentConfig | None = None
    """None: keys and values of their own. Otherwise `num_kv_heads` and `head_size` are those of what the cache holds: one head of
    the rotated key and the latent."""
    attention_softcap: float
    """Of the scores; 0 where there is none."""
    sinks: bool = False
    """Whether each head has a learned score that takes part in its softmax, without a value."""
    logits_softcap: float
    """0 where there is none."""
    windows: tuple[int | None, ...]
    """By layer: the tokens that one attends to, itself included; None: all before it."""
    ropes: tuple[RopeConfig, ...]
    """By layer."""
    interleaved_rope: bool = False
    """Whether the checkpoint rotates neighbouring elements, not those half a head apart."""
    max_position_embeddings: int
    """Longest sequence in tokens, after rope scaling."""
    experts: ExpertsConfig | None = None
    """None: every layer has a plain MLP."""
    further_layers: int = 0
    """Layers of the checkpoint after the last, which predict further tokens (MTP)."""
    vision: VisionConfig | None = None
    """None: the model reads text alone."""


def parse_decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads `config.json`'s object.

    Raises:
        ConfigError: A field is missing or asks for something that is not implemented; the message names it.
    """
    architectures = raw.get("architectures") or []
    if not architectures:
        raise ConfigError("config.json: architectures is missing")
    served, vision = family(architectures[0]), None
    if served.reads_images:
        text = text_fields(raw)
        [architecture] = text["architectures"]
        served, vision, raw = family(architecture), parse_vision(raw, architectures[0], architecture), text
    raw = {**served.assumes, **raw}
    _refuse_unsupported(raw, served)
    hidden_size, num_heads = whole_number(raw, "hidden_size"), whole_number(raw, "num_attention_heads")
    num_kv_heads = whole_number(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    head_size = whole_number(raw, "head_dim", default=hidden_size // num_heads)
    latent = parse_latent(raw) if served.has_latent else None
    rotating = head_size if latent is None else latent.rope_size
    ropes = parse_ropes(raw, rotating, whole_number(raw, "max_position_embeddings"))
    attention_bias = bool(raw.get("use_bias", raw.get("attention_bias", False)))
    windows = _windows(raw, whole_number(raw, "num_hidden_layers"))
    return DecoderConfig(
        vocab_size=whole_number(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole_number(raw, "intermediate_size"),
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if latent is None else 1,
        head_size=head_size if latent is None else latent.key_size,
        rms_norm_eps=float(raw.get(served.norm_eps, 1e-6)),
        norm_offset=served.norm_offset,
        norm=served.norm,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bool(raw.get("qkv_bias", attention_bias)),
        o_bias=bool(raw.get("attention_out_bias", attention_bias)),
        mlp_bias=bool(raw.get("use_bias", raw.get("mlp_bias", False))),
        activation=_activation(raw),
        gated_mlp=served.gated_mlp,
        qk_norm=served.qk_norm or bool(raw.get("use_qk_norm")),
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        logits_scale=_logits_scale(raw),
        attention_scale=_attention_scale(raw, head_size if latent is None else latent.head_size)
        * (1.0 if latent is None else ropes.whole.latent_factor),
        latent=latent,
        attention_softcap=float(raw.get("attn_logit_softcapping") or 0.0),
        sinks=served.sinks,
        logits_softcap=float(raw.get("final_logit_softcapping") or 0.0),
        windows=windows,
        ropes=_layer_ropes(raw, served, ropes, windows),
        interleaved_rope=served.interleaved_rope,
        max_position_embeddings=ropes.max_positions,
        experts=parse_experts(raw, len(windows)) if served.has_experts else None,
        further_layers=whole_number(raw, _FURTHER) if raw.get(_FURTHER) else 0,
        vision=vision,
    )


def _refuse_unsupported(raw: Mapping[str, Any], served: Family) -> None:
    if raw.get("use_qk_norm") and served.norm != "rms":
        raise ConfigError("config.json: use_qk_norm is set, and norms of this family's queries and keys are not supported")
    for field, causal in (("use_bidirectional_attention", False), ("is_causal", True)):
        if raw.get(field) is not None and bool(raw[field]) is not causal:
            raise ConfigError(f"config.json: {field} is {raw[field]!r}, and only causal attention is supported")


def _attention_scale(raw: Mapping[str, Any], head_size: int) -> float:
    if raw.get("attention_multiplier") is not None:
        return float(raw["attention_multiplier"])
    return float(raw.get("query_pre_attn_scalar") or head_size) ** -0.5


def _logits_scale(raw: Mapping[str, Any]) -> float:
    """Cohere states the factor, Granite the divisor."""
    divisor = float(raw.get("logits_scaling", 1.0))
    if not divisor:
        raise ConfigError("config.json: logits_scaling must not be 0")
    return float(raw.get("logit_scale", 1.0)) / divisor


def _layer_ropes(raw: Mapping[str, Any], served: Family, ropes: Ropes, windows: tuple[int | None, ...]) -> tuple[RopeConfig, ...]:
    """Each layer's rotary embedding, or none where the family leaves positions out."""
    rotates = [True] * len(windows)
    if served.rotates == "windowed" and raw.get("sliding_window") is not None:
        rotates = [window is not None for window in windows]
    elif served.rotates == "listed":
        period = raw.get("no_rope_layer_interval", 4)
        rotates = raw.get("no_rope_layers") or [(layer + 1) % period != 0 for layer in range(len(windows))]
        if len(rotates) != len(windows):
            raise ConfigError(f"config.json: no_rope_layers has {len(rotates)} entries for {len(windows)} layers")
    found = [ropes.whole if window is None else ropes.windowed for window in windows]
    return tuple(rope if rotated else rope.without_rotation() for rope, rotated in zip(found, rotates, strict=True))


def _activation(raw: Mapping[str, Any]) -> Activation:
    field = "hidden_activation" if raw.get("hidden_activation") else "hidden_act"
    name = raw.get(field, "silu")
    if name not in _ACTIVATIONS:
        raise ConfigError(f"config.json: {field} {name!r} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]


def _windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """`sliding_window` for the layers that `layer_types` names, or else for those by the family's rule."""
    window, kinds = raw.get("sliding_window"), raw.get("layer_types")
    if kinds is None:
        if window is None or raw.get("use_sliding_window") is False:
            return (None,) * num_layers
        period, first = raw.get("sliding_window_pattern"), raw.get("max_window_layers", 0)
        windowed = [layer >= first if period is None else (layer + 1) % period != 0 for layer in range(num_layers)]
    else:
        if len(kinds) != num_layers:
            raise ConfigError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
        others = sorted({str(kind) for kind in kinds} - set(_LAYER_TYPES))
        if others:
            raise ConfigError(f"config.json: layer_types has {', '.join(others)} (supported: {', '.join(_LAYER_TYPES)})")
        windowed = [kind == "sliding_attention" for kind in kinds]
    if not any(windowed):
        return (None,) * num_layers
    size = whole_number(raw, "sliding_window")
    return tuple(size if is_windowed else None for is_windowed in windowed)
