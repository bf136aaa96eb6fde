"""The shape of a dense decoder, read from a checkpoint's `config.json`. No torch: the frontend reads it too.

Both spellings of Hugging Face's configuration are understood: `torch_dtype`, `rope_theta` and `rope_scaling` as written before
transformers 5, `dtype` and `rope_parameters` as written since. What is not implemented is refused by the name of its field.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.engine.config import ConfigError

ROPE_TYPES = ("default", "linear", "llama3")
LAYER_TYPES = ("full_attention", "sliding_attention")
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding over the whole head."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of attention and gated MLP; sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position_embeddings: int
    """Longest sequence in tokens, after rope scaling."""
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Per layer, the tokens that a query sees, itself included; None: all before it."""


def parse_decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads `config.json`'s object.

    Raises:
        ConfigError: A field is missing or asks for something that is not implemented; the message names it.
    """
    _refuse_unsupported(raw)
    hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    num_kv_heads = _size(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    head_size = _size(raw, "head_dim", default=hidden_size // num_heads)
    if head_size % 2:
        raise ConfigError(f"config.json: head_dim {head_size} is odd, so that rotary embedding cannot pair its halves")
    rope = _parse_rope(raw)
    positions = _size(raw, "max_position_embeddings")
    return DecoderConfig(
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        # Linear scaling stretches the positions; llama3 states the stretched length already.
        max_position_embeddings=int(positions * rope.factor) if rope.type == "linear" else positions,
        rope=rope,
        windows=_windows(raw),
    )


def _size(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {field} must be a positive whole number, not {value!r}")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config") is not None:
        raise ConfigError("config.json: quantization_config is set, and quantised checkpoints are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported (supported: 'silu')")
    others = sorted({str(kind) for kind in raw.get("layer_types") or ()} - set(LAYER_TYPES))
    if others:
        raise ConfigError(f"config.json: layer_types has {', '.join(others)} (supported: {', '.join(LAYER_TYPES)})")


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer, from `sliding_window` and what says where it holds: `layer_types`, `max_window_layers`, or nothing (all)."""
    layers = _size(raw, "num_hidden_layers")
    # Qwen's configurations name a window that only this flag puts to use.
    off = not raw.get("use_sliding_window", "max_window_layers" not in raw)
    if off or raw.get("sliding_window") is None:
        return (None,) * layers
    window, types = _size(raw, "sliding_window"), raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(types) != layers:
        raise ConfigError(f"config.json: layer_types has {len(types)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling: Mapping[str, Any] = raw.get(field) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"config.json: {field} has the type {kind!r} (supported: {', '.join(ROPE_TYPES)})")
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor {partial} is not supported (supported: 1.0)")
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if kind == "default":
        return RopeConfig(theta=theta)
    needed = _LLAMA3_FIELDS if kind == "llama3" else ("factor",)
    missing = [name for name in needed if name not in scaling]
    if missing:
        raise ConfigError(f"config.json: {field} of type {kind!r} lacks {', '.join(missing)}")
    if kind == "linear":
        return RopeConfig(type="linear", theta=theta, factor=float(scaling["factor"]))
    return RopeConfig(
        type="llama3",
        theta=theta,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
    )
