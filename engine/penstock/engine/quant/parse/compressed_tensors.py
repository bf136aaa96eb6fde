"""`quant_method: compressed-tensors`, as llm-compressor writes it."""

from collections.abc import Mapping
from typing import Any

from penstock.engine.quant.parse.fields import choice, group_size, names, refuse
from penstock.engine.quant.scheme import ActivationScheme, CheckpointQuantization, Rule, StoredForm, WeightScheme

_INTEGERS: tuple[StoredForm, ...] = ("pack-quantized", "int-quantized")
_FORMS: tuple[StoredForm, ...] = (*_INTEGERS, "float-quantized", "mxfp4-pack-quantized")
BLOCK = [128, 128]
MXFP4_GROUP = 32


def parse(raw: Mapping[str, Any]) -> CheckpointQuantization:
    """Returns what it says; ConfigError names the field that cannot be served."""
    choice(raw, "quantization_status", ("compressed",), "compressed")
    if (sparsity := raw.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refuse("sparsity_config.format", f"is {sparsity['format']!r}; sparse weights are not supported")
    if (raw.get("transform_config") or {}).get("config_groups"):
        raise refuse("transform_config", "is set; transforms of weights are not supported")
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(group, Mapping) for group in groups.values()):
        raise refuse("config_groups", "has no group of layers with their scheme")
    return CheckpointQuantization(
        method="compressed-tensors",
        rules=tuple(_rule(raw, name, group) for name, group in groups.items()),
        ignore=names(raw, "ignore"),
    )


def _rule(raw: Mapping[str, Any], name: str, group: Mapping[str, Any]) -> Rule:
    where = f"config_groups.{name}"
    targets = names(group, "targets")
    if not targets:
        raise refuse(f"{where}.targets", "names no layers")
    if group.get("output_activations") is not None:
        raise refuse(f"{where}.output_activations", "is set; outputs of layers cannot be quantized")
    form = _form({"format": group.get("format") or raw.get("format")}, where)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise refuse(f"{where}.weights", f"is {weights!r}; activations alone cannot be quantized")
    inputs = group.get("input_activations")
    activations = None if inputs is None else _activations(inputs, f"{where}.input_activations.")
    return Rule(targets, _weights(weights, form, f"{where}.weights.", activations))


def _form(raw: Mapping[str, Any], where: str) -> StoredForm:
    if raw["format"] == "naive-quantized":
        return "float-quantized"
    if raw["format"] not in _FORMS:
        raise refuse(f"{where}.format", f"is {raw['format']!r} (supported: {', '.join(_FORMS)})")
    return raw["format"]


def _weights(raw: Mapping[str, Any], form: StoredForm, where: str, activations: ActivationScheme | None) -> WeightScheme:
    kind = choice(raw, "type", ("int", "float"), "int", where)
    if kind == "int" and form == "float-quantized":
        form = "int-quantized"  # `naive-quantized`, of either kind
    if (kind == "int") is not (form in _INTEGERS):
        raise refuse(f"{where}type", f"is {kind!r}, which {form} does not hold")
    bits = choice(raw, "num_bits", {"pack-quantized": (4, 8), "mxfp4-pack-quantized": (4,)}.get(form, (8,)), where=where)
    choice(raw, "dynamic", (False,), False, where)
    choice(raw, "actorder", (None, False, "static", "weight"), where=where)
    strategy = choice(raw, "strategy", _strategies(form), where=where)
    symmetric = choice(raw, "symmetric", (True, False) if kind == "int" else (True,), True, where)
    if strategy == "block" and _block(raw.get("block_structure")) != BLOCK:
        raise refuse(f"{where}block_structure", f"is {raw.get('block_structure')!r} (supported: {BLOCK})")
    group = group_size(raw, where) if strategy == "group" else BLOCK[1] if strategy == "block" else None
    if form == "mxfp4-pack-quantized" and group != MXFP4_GROUP:
        raise refuse(f"{where}group_size", f"is {group}; MXFP4 has groups of {MXFP4_GROUP}")
    outputs = {"tensor": None, "block": BLOCK[0]}.get(strategy, 1)
    return WeightScheme(form=form, bits=bits, group=group, outputs=outputs, symmetric=symmetric, activations=activations)


def _strategies(form: StoredForm) -> tuple[str, ...]:
    if form == "mxfp4-pack-quantized":
        return ("group",)
    return ("tensor", "channel", "group", "block") if form == "float-quantized" else ("tensor", "channel", "group")


def _block(raw: Any) -> Any:
    """`128x128`, as older files spell it, is [128, 128]."""
    return [int(size) for size in raw.split("x")] if isinstance(raw, str) and raw.replace("x", "").isdigit() else raw


def _activations(raw: Any, where: str) -> ActivationScheme:
    if not isinstance(raw, Mapping):
        raise refuse(where.removesuffix("."), f"is {raw!r}")
    kind = choice(raw, "type", ("int", "float"), "int", where)
    choice(raw, "num_bits", (8,), where=where)
    dynamic = choice(raw, "dynamic", (True, False), False, where)
    strategy = choice(raw, "strategy", ("tensor", "token", "group") if dynamic else ("tensor",), where=where)
    symmetric = choice(raw, "symmetric", (True,) if dynamic or kind == "float" else (True, False), True, where)
    group = group_size(raw, where) if strategy == "group" else None
    return ActivationScheme(number="int8" if kind == "int" else "float8", dynamic=dynamic, group=group, symmetric=symmetric)
