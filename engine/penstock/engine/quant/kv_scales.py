"""Scales of a KV cache of eight bits, which a checkpoint holds for each layer: what is stored is a value divided by its scale."""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import safetensors

from penstock.engine.attention.context import KVScales
from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import weight_files
from penstock.engine.models.llama import KV_SCALE

log = logging.getLogger(__name__)

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.[^.]*attn\.(.+)$")
_BOTH, _KEYS, _VALUES = (0, 1), (0,), (1,)
_LAST_WORD: Final = {"kv_scale": _BOTH, "k_scale": _KEYS, "v_scale": _VALUES}
_OUTPUTS: Final = {"k_proj.output_scale": _KEYS, "v_proj.output_scale": _VALUES}


def read_kv_scales(path: Path, num_layers: int, needed: bool = True) -> Sequence[KVScales] | None:
    """Return the scales of each layer; 1.0 where the checkpoint has none. None: it has none at all.

    Args:
        path: The checkpoint's folder.
        num_layers: Of the decoder; those after them (MTP) have scales of 1.0.
        needed: Whether to warn of layers without: E4M3 ends at 448, E5M2 at 57,344.

    Raises:
        ConfigError: A scale is no positive number, there is more than one for a layer's keys or values, or two tensors disagree.
    """
    found: dict[tuple[int, int], tuple[float, str]] = {}
    for file in weight_files(path):
        with safetensors.safe_open(file, framework="pt") as tensors:
            for name in list(tensors.keys()):
                layer, sides = _meaning(name)
                if not sides or layer >= num_layers:
                    continue
                scale = _scale(name, tensors.get_tensor(name).flatten().float().tolist())
                for side in sides:
                    known, other = found.setdefault((layer, side), (scale, name))
                    if known != scale:
                        raise ConfigError(f"{name} is {scale:g}, but {other} is {known:g}: both are the KV cache's scale")
    missing = [f"layer {at}" for at in range(num_layers) if (at, 0) not in found or (at, 1) not in found]
    if missing and needed:
        where = "the checkpoint" if len(missing) == num_layers else ", ".join(missing)
        log.warning("KV cache: %s has no scales for keys and values; 1.0 is used, and what is beyond 448 is cut", where)
    if not found:
        return None
    ones = (1.0, "")
    return [KVScales(found.get((at, 0), ones)[0], found.get((at, 1), ones)[0]) for at in range(num_layers)]


def _meaning(name: str) -> tuple[int, Sequence[int]]:
    """Return the layer that a tensor's scale is for, and whether of keys (0) or values (1); no side: it is none of these."""
    layer = _LAYER.search(name)
    if layer is None or not KV_SCALE.search(name) or "vision" in name:
        return 0, ()
    return int(layer[1]), _OUTPUTS.get(layer[2]) or _LAST_WORD.get(name.rpartition(".")[2], ())


def _scale(name: str, values: Sequence[float]) -> float:
    if len(values) != 1:
        raise ConfigError(f"{name} has {len(values)} scales: all heads of a layer share one for keys and one for values so far")
    if not math.isfinite(values[0]) or values[0] <= 0:
        raise ConfigError(f"{name} is {values[0]:g}: a scale must be a positive number")
    return values[0]
