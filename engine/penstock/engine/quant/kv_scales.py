"""Scales of a KV cache of eight bits, which a checkpoint holds for each layer, or for each of its heads: what is stored is a
value divided by its scale."""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import safetensors
import torch

from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import weight_files
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.llama import KV_SCALE

log = logging.getLogger(__name__)

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.[^.]*attn\.(.+)$")
_BOTH, _KEYS, _VALUES = (0, 1), (0,), (1,)
_LAST_WORD: Final = {"kv_scale": _BOTH, "k_scale": _KEYS, "v_scale": _VALUES}
_OUTPUTS: Final = {"k_proj.output_scale": _KEYS, "v_proj.output_scale": _VALUES}


class KVScales(NamedTuple):
    """One layer's, by KV head of the whole model."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def part(self, heads: Span) -> torch.Tensor:
        """[2, heads] float32: those of a rank's heads, of keys and of values."""
        return torch.tensor([side[heads.start : heads.stop] for side in self], dtype=torch.float32)


def read_kv_scales(path: Path, num_layers: int, heads: int, needed: bool = True) -> Sequence[KVScales] | None:
    """Return the scales of each layer; 1.0 where the checkpoint has none. None: it has none at all.

    Args:
        path: The checkpoint's folder.
        num_layers: Of the decoder; those after them (MTP) have scales of 1.0.
        heads: KV heads of a layer. A layer has a scale for each of them, or one for all.
        needed: Whether to warn of layers without: E4M3 ends at 448, E5M2 at 57,344.

    Raises:
        ConfigError: A scale is no positive number, their number is none of the two, or two tensors disagree.
    """
    found: dict[tuple[int, int], tuple[tuple[float, ...], str]] = {}
    for file in weight_files(path):
        with safetensors.safe_open(file, framework="pt") as tensors:
            for name in list(tensors.keys()):
                layer, sides = _meaning(name)
                if not sides or layer >= num_layers:
                    continue
                scales = _scales(name, tensors.get_tensor(name).flatten().float().tolist(), heads)
                for side in sides:
                    known, other = found.setdefault((layer, side), (scales, name))
                    if known != scales:
                        ours, theirs = next(pair for pair in zip(scales, known, strict=True) if pair[0] != pair[1])
                        raise ConfigError(f"{name} is {ours:g}, but {other} is {theirs:g}: both are the KV cache's scale")
    missing = [f"layer {at}" for at in range(num_layers) if (at, 0) not in found or (at, 1) not in found]
    if missing and needed:
        where = "the checkpoint" if len(missing) == num_layers else ", ".join(missing)
        log.warning("KV cache: %s has no scales for keys and values; 1.0 is used, and what is beyond 448 is cut", where)
    if not found:
        return None
    ones = ((1.0,) * heads, "")
    return [KVScales(found.get((at, 0), ones)[0], found.get((at, 1), ones)[0]) for at in range(num_layers)]


def _meaning(name: str) -> tuple[int, Sequence[int]]:
    """Return the layer that a tensor's scale is for, and whether of keys (0) or values (1); no side: it is none of these."""
    layer = _LAYER.search(name)
    if layer is None or not KV_SCALE.search(name) or "vision" in name:
        return 0, ()
    return int(layer[1]), _OUTPUTS.get(layer[2]) or _LAST_WORD.get(name.rpartition(".")[2], ())


def _scales(name: str, values: Sequence[float], heads: int) -> tuple[float, ...]:
    """Return one for each head."""
    if len(values) not in (1, heads):
        raise ConfigError(f"{name} has {len(values)} scales: a layer has one, or one for each of its {heads} KV heads")
    for at, value in enumerate(values):
        if not math.isfinite(value) or value <= 0:
            of = f"[{at}]" if len(values) > 1 else ""
            raise ConfigError(f"{name}{of} is {value:g}: a scale must be a positive number")
    return tuple(values) * (heads // len(values))
