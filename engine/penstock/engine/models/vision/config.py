"""The part of a checkpoint's `config.json` that says how the model sees. No torch: the frontend reads it too."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.engine.config import ConfigError
from penstock.engine.models.fields import whole_number

CLIP_DEFAULTS: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""Those of LLaVA, which its checkpoints may leave out."""
_ACTIVATIONS: Final = ("quick_gelu", "gelu")


class TowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A vision transformer over the patches of a square image."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    """That run: what comes after the features is not needed."""
    num_heads: int
    image_size: int
    """Pixels of either side."""
    patch_size: int
    norm_eps: float
    activation: str

    @property
    def num_patches(self) -> int:
        """Of an image."""
        return (self.image_size // self.patch_size) ** 2


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A tower, what brings its features into the decoder's space, and the token in whose place they stand."""

    tower: TowerConfig
    keeps_class: bool
    """Whether the tower's class token is among the features."""
    projector_bias: bool
    image_token_id: int
    text_architecture: str
    """Of the decoder."""

    @property
    def tokens_per_image(self) -> int:
        """Embeddings of an image, and placeholders in a prompt."""
        return self.tower.num_patches + self.keeps_class


def parse_llava(raw: Mapping[str, Any], text_architecture: str) -> VisionConfig:
    """Reads the object of a LLaVA 1.5 checkpoint; `ConfigError` names a field that is missing or not supported."""
    tower = raw.get("vision_config")
    if not isinstance(tower, Mapping):
        raise ConfigError("config.json: vision_config is missing")
    if tower.get("model_type", "clip_vision_model") != "clip_vision_model":
        raise ConfigError(f"config.json: vision_config.model_type {tower['model_type']!r} is not supported")
    feature_layer, strategy = raw.get("vision_feature_layer", -2), raw.get("vision_feature_select_strategy", "default")
    if not isinstance(feature_layer, int):
        raise ConfigError("config.json: vision_feature_layer lists several layers, and features of one are supported")
    if strategy not in ("default", "full"):
        raise ConfigError(f"config.json: vision_feature_select_strategy {strategy!r} is not supported (default and full are)")
    if raw.get("projector_hidden_act", "gelu") != "gelu":
        raise ConfigError(f"config.json: projector_hidden_act {raw['projector_hidden_act']!r} is not supported (gelu is)")
    return VisionConfig(
        tower=_clip({**CLIP_DEFAULTS, **tower}, feature_layer),
        keeps_class=strategy == "full",
        projector_bias=bool(raw.get("multimodal_projector_bias", True)),
        image_token_id=whole_number(raw, "image_token_id", default=raw.get("image_token_index", 32000)),
        text_architecture=text_architecture,
    )


def _clip(raw: Mapping[str, Any], feature_layer: int) -> TowerConfig:
    layers, heads = whole_number(raw, "num_hidden_layers"), whole_number(raw, "num_attention_heads")
    hidden, activation = whole_number(raw, "hidden_size"), raw.get("hidden_act", "quick_gelu")
    # State 0 is what enters the first layer; negative ones count from the last layer's output.
    running = feature_layer if feature_layer >= 0 else layers + 1 + feature_layer
    if not 0 <= running <= layers:
        raise ConfigError(f"config.json: vision_feature_layer {feature_layer} is none of {layers} layers")
    if hidden % heads:
        raise ConfigError(f"config.json: vision_config.hidden_size {hidden} is no multiple of {heads} heads")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"config.json: vision_config.hidden_act {activation!r} is not supported")
    return TowerConfig(
        hidden_size=hidden,
        intermediate_size=whole_number(raw, "intermediate_size"),
        num_layers=running,
        num_heads=heads,
        image_size=whole_number(raw, "image_size"),
        patch_size=whole_number(raw, "patch_size"),
        norm_eps=float(raw.get("layer_norm_eps", 1e-5)),
        activation=activation,
    )
