"""A mixture of experts as a checkpoint's `config.json` describes it. No torch."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.engine.config import ConfigError
from penstock.engine.models.fields import whole_number


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a decoder's layers, and how their routers choose."""

    count: int
    top_k: int
    """Experts of a token."""
    intermediate_size: int
    """Of one expert."""
    layers: tuple[bool, ...]
    """By layer, whether it has experts; otherwise it has a plain MLP."""
    sigmoid: bool
    """Whether scores are sigmoids of the logits; otherwise a softmax."""
    in_float32: bool
    """Whether logits are computed in float32 whatever the model's dtype."""
    corrected: bool
    """Whether the choice adds a bias of the checkpoint to the scores."""
    renormalise: bool
    """Whether a token's weights are divided by their sum."""
    scale: float
    """Multiplies them."""
    groups: int
    top_groups: int
    """Groups that a token's experts are chosen from."""
    shared_size: int
    """Of the expert that all tokens share; 0: none."""
    biased: bool
    """Whether the router and the experts' layers have biases."""
    clamp: tuple[float, float] | None
    """Slope and limit of a clamped SwiGLU in place of the model's activation; None: the model's."""
    shared_gate: bool
    """Whether that expert's result is multiplied by a gate of its own."""
    shared_name: str


_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def parse_experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Reads `config.json`'s object, with the family's defaults in it.

    Raises:
        ConfigError: A field is missing or contradicts another; the message names it.
    """
    named = next((name for name in _COUNTS if raw.get(name) is not None), _COUNTS[0])
    count, top_k = whole_number(raw, named), whole_number(raw, "num_experts_per_tok")
    if top_k > count:
        raise ConfigError(f"config.json: num_experts_per_tok {top_k} exceeds {named} {count}")
    groups, top_groups = whole_number(raw, "n_group", 1), whole_number(raw, "topk_group", 1)
    if raw.get("topk_method") == "greedy":
        groups = top_groups = 1
    if count % groups:
        raise ConfigError(f"config.json: {named} {count} cannot be divided into {groups} groups (n_group)")
    if top_groups > groups or top_groups * (count // groups) < top_k:
        raise ConfigError(
            f"config.json: topk_group {top_groups} of {groups} groups of {count // groups} experts leaves no {top_k} to choose"
        )
    size = whole_number(raw, "moe_intermediate_size" if raw.get("moe_intermediate_size") is not None else "intermediate_size")
    sigmoid = raw.get("scoring_func", "softmax") == "sigmoid"
    _refuse_unsupported(raw, sigmoid)
    if sigmoid and groups > 1 and count // groups < 2:
        raise ConfigError(f"config.json: n_group {groups}: a group needs two experts to be ranked by, and has one")
    gated = raw.get("shared_expert_intermediate_size")
    shared = gated or size * (raw.get("n_shared_experts") or 0)
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=size,
        layers=_layers(raw, num_layers),
        sigmoid=sigmoid,
        in_float32=sigmoid or bool(raw.get("router_in_float32", False)),
        corrected=sigmoid,
        renormalise=bool(raw.get("norm_topk_prob", False)),
        scale=float(raw.get("routed_scaling_factor") or 1.0),
        groups=groups,
        top_groups=top_groups,
        shared_size=int(shared),
        biased=bool(raw.get("experts_bias", False)),
        clamp=_clamp(raw),
        shared_gate=bool(gated),
        shared_name="shared_expert" if gated else "shared_experts",
    )


def _refuse_unsupported(raw: Mapping[str, Any], sigmoid: bool) -> None:
    method = raw.get("topk_method")
    allowed = ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy")
    if method is not None and method not in allowed:
        raise ConfigError(f"config.json: topk_method {method!r} is not supported here (supported: {', '.join(allowed)})")
    if method in ("greedy", "group_limited_greedy") and raw.get("norm_topk_prob"):
        raise ConfigError("config.json: norm_topk_prob is set, and this family's weights are not divided by their sum")
    if raw.get("moe_layer_freq") not in (None, 1):
        raise ConfigError(
            f"config.json: moe_layer_freq is {raw['moe_layer_freq']!r}, and only experts in every layer are supported"
        )


def _clamp(raw: Mapping[str, Any]) -> tuple[float, float] | None:
    if "swiglu_alpha" not in raw:
        return None
    found = float(raw["swiglu_alpha"]), float(raw["swiglu_limit"])
    if found[1] <= 0:
        raise ConfigError(f"config.json: swiglu_limit must be above 0, not {raw['swiglu_limit']}")
    return found


def _layers(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    plain, step = raw.get("mlp_only_layers") or (), whole_number(raw, "decoder_sparse_step", 1)
    first = raw.get("first_k_dense_replace") or 0
    return tuple(layer >= first and layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers))
