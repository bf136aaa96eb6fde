"""The part of a checkpoint's `config.json` that says how the model sees. No torch: the frontend reads it too."""

import math
from collections.abc import Callable, Mapping
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
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""Those of LLaVA, which its checkpoints may leave out."""
SIGLIP_DEFAULTS: Final = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""transformers' own."""
QWEN_DEFAULTS: Final = {
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "depth": 32,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
    "out_hidden_size": 3584,
    "hidden_act": "silu",
}
"""transformers' own."""
QWEN3_DEFAULTS: Final = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
    "out_hidden_size": 3584,
    "hidden_act": "gelu_pytorch_tanh",
}
"""transformers' own."""
LLAVA_NEXT_RESOLUTIONS: Final = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""transformers' own."""
_ACTIVATIONS: Final = ("quick_gelu", "gelu", "gelu_pytorch_tanh")


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


class PatchTowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A vision transformer over the patches of an image of any size."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge_size: int
    """Patches of either side of the square that becomes one embedding."""
    temporal_patch_size: int
    """Frames of a film that are one patch."""
    out_size: int
    """Of an embedding."""


class QwenTowerConfig(PatchTowerConfig, frozen=True, kw_only=True):
    """Qwen2.5-VL's: most layers see windows of an image."""

    window_size: int
    """Pixels of either side of a window."""
    full_layers: tuple[int, ...]
    """Layers without windows."""


class Qwen3TowerConfig(PatchTowerConfig, frozen=True, kw_only=True):
    """Qwen3-VL's: features of several layers."""

    positions_per_side: int
    """Of the square table of positions, which is stretched over an image."""
    deep_layers: tuple[int, ...]
    """Layers whose features are added after the decoder's first ones, in this order."""


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a model sees, and the token in whose place it sees."""

    image_token_id: int
    text_architecture: str
    """Of the decoder."""


class SquareConfig(VisionConfig, frozen=True, kw_only=True):
    """A tower that reads squares of one size."""

    tower: TowerConfig
    tokens_per_image: int
    """Embeddings of an image, and placeholders in a prompt."""


class PatchConfig(VisionConfig, frozen=True, kw_only=True):
    """Of a model that reads images in about their own size."""

    tower: PatchTowerConfig


class QwenConfig(PatchConfig, frozen=True, kw_only=True):
    """Qwen2.5-VL's."""

    tower: QwenTowerConfig


class Qwen3Config(PatchConfig, frozen=True, kw_only=True):
    """Qwen3-VL's."""

    tower: Qwen3TowerConfig


class LlavaConfig(SquareConfig, frozen=True, kw_only=True):
    """LLaVA 1.5's."""

    keeps_class: bool
    """Whether the tower's class token is among the features."""
    projector_bias: bool


class LlavaNextConfig(LlavaConfig, frozen=True, kw_only=True):
    """LLaVA-NeXT's. The tower reads the whole image and tiles of it."""

    resolutions: tuple[tuple[int, int], ...]
    """Height and width of those of which tiles are made."""


class Gemma3Config(SquareConfig, frozen=True, kw_only=True):
    """Gemma 3's. The tokens of an image see each other both ways."""

    tokens_per_side: int
    """Of the square that an image's embeddings make."""
    begin_token_id: int
    """What a chat template writes for an image. A prompt has it before the placeholders."""
    end_token_id: int
    """What a prompt has after them."""


def parse_vision(raw: Mapping[str, Any], architecture: str, text_architecture: str) -> VisionConfig:
    """Reads `config.json`'s object; `ConfigError` names a field that is missing or not supported."""
    return _PARSERS[architecture](raw, text_architecture)


def parse_llava(raw: Mapping[str, Any], text_architecture: str) -> LlavaConfig:
    """Reads the object of a LLaVA 1.5 checkpoint; `ConfigError` names a field that is missing or not supported."""
    tower = _tower_fields(raw, "clip_vision_model", CLIP_DEFAULTS)
    feature_layer, strategy = raw.get("vision_feature_layer", -2), raw.get("vision_feature_select_strategy", "default")
    if not isinstance(feature_layer, int):
        raise ConfigError("config.json: vision_feature_layer lists several layers, and features of one are supported")
    if strategy not in ("default", "full"):
        raise ConfigError(f"config.json: vision_feature_select_strategy {strategy!r} is not supported (default and full are)")
    if raw.get("projector_hidden_act", "gelu") != "gelu":
        raise ConfigError(f"config.json: projector_hidden_act {raw['projector_hidden_act']!r} is not supported (gelu is)")
    layers = whole_number(tower, "num_hidden_layers")
    # State 0 is what enters the first layer; negative ones count from the last layer's output.
    running = feature_layer if feature_layer >= 0 else layers + 1 + feature_layer
    if not 0 <= running <= layers:
        raise ConfigError(f"config.json: vision_feature_layer {feature_layer} is none of {layers} layers")
    parsed = _tower(tower, running)
    return LlavaConfig(
        tower=parsed,
        keeps_class=strategy == "full",
        projector_bias=bool(raw.get("multimodal_projector_bias", True)),
        image_token_id=whole_number(raw, "image_token_id", default=raw.get("image_token_index", 32000)),
        text_architecture=text_architecture,
        tokens_per_image=parsed.num_patches + (strategy == "full"),
    )


def parse_llava_next(raw: Mapping[str, Any], text_architecture: str) -> LlavaNextConfig:
    """Reads the object of a LLaVA-NeXT checkpoint; `ConfigError` names a field that is missing or not supported."""
    llava, given = parse_llava(raw, text_architecture), raw.get("image_grid_pinpoints") or LLAVA_NEXT_RESOLUTIONS
    if llava.keeps_class:
        raise ConfigError("config.json: vision_feature_select_strategy 'full' is not supported for tiles (default is)")
    side, patch = llava.tower.image_size, llava.tower.patch_size
    if side % patch:
        raise ConfigError(f"config.json: vision_config.image_size {side} is no multiple of patch_size {patch}")
    resolutions: list[tuple[int, int]] = []
    for one in given if isinstance(given, list | tuple) else [given]:
        match one:
            case [int(height), int(width)] if min(height, width) > 0 and height % side == width % side == 0:
                resolutions.append((height, width))
            case _:
                raise ConfigError(
                    f"config.json: image_grid_pinpoints must list heights and widths in multiples of {side}, not {one}"
                )
    return LlavaNextConfig(
        tower=llava.tower,
        keeps_class=False,
        projector_bias=llava.projector_bias,
        image_token_id=llava.image_token_id,
        text_architecture=text_architecture,
        tokens_per_image=llava.tokens_per_image,
        resolutions=tuple(resolutions),
    )


def parse_gemma3(raw: Mapping[str, Any], text_architecture: str) -> Gemma3Config:
    """Reads the object of a Gemma 3 checkpoint; `ConfigError` names a field that is missing or not supported."""
    if text_architecture != "Gemma3ForCausalLM":
        raise ConfigError("config.json: text_config.model_type is not supported for Gemma 3 (gemma3_text is)")
    tower = _tower_fields(raw, "siglip_vision_model", SIGLIP_DEFAULTS)
    parsed = _tower(tower, whole_number(tower, "num_hidden_layers"))
    tokens, side = whole_number(raw, "mm_tokens_per_image", default=256), parsed.image_size // parsed.patch_size
    per_side = math.isqrt(tokens)
    if per_side**2 != tokens or side % per_side:
        raise ConfigError(f"config.json: mm_tokens_per_image {tokens} does not divide {side} x {side} patches into squares")
    return Gemma3Config(
        tower=parsed,
        image_token_id=whole_number(raw, "image_token_id", default=raw.get("image_token_index", 262144)),
        text_architecture=text_architecture,
        tokens_per_image=tokens,
        tokens_per_side=per_side,
        begin_token_id=whole_number(raw, "boi_token_id", default=raw.get("boi_token_index", 255999)),
        end_token_id=whole_number(raw, "eoi_token_id", default=raw.get("eoi_token_index", 256000)),
    )


def parse_qwen(raw: Mapping[str, Any], text_architecture: str) -> QwenConfig:
    """Reads the object of a Qwen2.5-VL checkpoint; `ConfigError` names a field that is missing or not supported."""
    tower = _qwen_fields(raw, QWEN_DEFAULTS, "silu")
    patch, merge, window = (whole_number(tower, field) for field in ("patch_size", "spatial_merge_size", "window_size"))
    if window < patch * merge:
        raise ConfigError(f"config.json: vision_config.window_size {window} is less than {patch * merge}: one embedding's pixels")
    full = tower["fullatt_block_indexes"]
    if not isinstance(full, list | tuple) or not all(isinstance(layer, int) for layer in full):
        raise ConfigError("config.json: vision_config.fullatt_block_indexes must list layers")
    return QwenConfig(
        tower=QwenTowerConfig(**_patch_tower(tower), window_size=window, full_layers=tuple(full)),
        image_token_id=whole_number(raw, "image_token_id", default=151655),
        text_architecture=text_architecture,
    )


def parse_qwen3(raw: Mapping[str, Any], text_architecture: str) -> Qwen3Config:
    """Reads the object of a Qwen3-VL checkpoint; `ConfigError` names a field that is missing or not supported."""
    tower = _qwen_fields(raw, QWEN3_DEFAULTS, "gelu_pytorch_tanh")
    layers, positions, deep = (tower[field] for field in ("depth", "num_position_embeddings", "deepstack_visual_indexes"))
    side = math.isqrt(whole_number(tower, "num_position_embeddings"))
    if side**2 != positions:
        raise ConfigError(f"config.json: vision_config.num_position_embeddings {positions} is no square")
    if not isinstance(deep, list | tuple) or sorted(set(deep)) != list(deep) or not set(deep) <= set(range(layers)):
        raise ConfigError(
            f"config.json: vision_config.deepstack_visual_indexes must list layers of {layers} in order, not {deep}"
        )
    return Qwen3Config(
        tower=Qwen3TowerConfig(**_patch_tower(tower), positions_per_side=side, deep_layers=tuple(deep)),
        image_token_id=whole_number(raw, "image_token_id", default=151655),
        text_architecture=text_architecture,
    )


_PATCH_FIELDS: Final = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "depth",
    "num_heads": "num_heads",
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
    "out_size": "out_hidden_size",
}
"""Of `PatchTowerConfig`, by the names of checkpoints."""


def _patch_tower(tower: Mapping[str, Any]) -> dict[str, int]:
    """What `PatchTowerConfig` has."""
    return {ours: whole_number(tower, theirs) for ours, theirs in _PATCH_FIELDS.items()}


def _qwen_fields(raw: Mapping[str, Any], defaults: Mapping[str, Any], activation: str) -> dict[str, Any]:
    given = raw.get("vision_config")
    if not isinstance(given, Mapping):
        raise ConfigError("config.json: vision_config is missing")
    tower = {**defaults, **given}
    if tower["hidden_act"] != activation:
        raise ConfigError(f"config.json: vision_config.hidden_act {tower['hidden_act']!r} is not supported ({activation} is)")
    hidden, heads = whole_number(tower, "hidden_size"), whole_number(tower, "num_heads")
    if hidden % (4 * heads):
        raise ConfigError(
            f"config.json: vision_config.hidden_size {hidden} is no multiple of 4 elements for each of {heads} heads"
        )
    return tower


_PARSERS: Final[dict[str, Callable[[Mapping[str, Any], str], VisionConfig]]] = {
    "Gemma3ForConditionalGeneration": parse_gemma3,
    "LlavaForConditionalGeneration": parse_llava,
    "LlavaNextForConditionalGeneration": parse_llava_next,
    "Qwen2_5_VLForConditionalGeneration": parse_qwen,
    "Qwen3VLForConditionalGeneration": parse_qwen3,
    "Qwen3VLMoeForConditionalGeneration": parse_qwen3,
}


def _tower_fields(raw: Mapping[str, Any], kind: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    tower = raw.get("vision_config")
    if not isinstance(tower, Mapping):
        raise ConfigError("config.json: vision_config is missing")
    if tower.get("model_type", kind) != kind:
        raise ConfigError(f"config.json: vision_config.model_type {tower['model_type']!r} is not supported ({kind} is)")
    return {**defaults, **tower}


def _tower(raw: Mapping[str, Any], running: int) -> TowerConfig:
    heads, hidden, activation = whole_number(raw, "num_attention_heads"), whole_number(raw, "hidden_size"), raw["hidden_act"]
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
        norm_eps=float(raw["layer_norm_eps"]),
        activation=activation,
    )
