"""How a checkpoint's rotary position embedding is stretched beyond the length that it was trained with. No torch.

Read as transformers 5 writes it (`rope_parameters`, one for each kind of layer where they differ) and as written before
(`rope_theta`, `rope_scaling`, and `rope_local_base_freq` for Gemma 3's layers with a window).
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.engine.config import ConfigError

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ALIASES = {"su": "longrope", "mrope": "default"}


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding of the first `size` elements of each head."""

    size: int
    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """The length that the model was trained with before it was stretched."""
    attention_factor: float = 1.0
    """Scales cosine and sine, so its square scales the scores."""
    latent_factor: float = 1.0
    """Scales the scores of latent attention, also those of what does not rotate."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """[size / 2]: of the wavelengths where the context is no longer than the original."""
    long_factor: tuple[float, ...] = ()
    """[size / 2]: of the wavelengths where it is longer."""
    sections: tuple[int, ...] = ()
    """Pairs that turn by the position in time, then those by row, then those by column (M-RoPE); empty: all by one position."""
    interleaved_sections: bool = False
    """Whether the pairs take turns (time, row, column, time, …) as long as there are some of each; the rest turns by time."""

    def without_rotation(self) -> "RopeConfig":
        """For a layer that leaves positions out: of the same size, so that kernels need no second form, with angles of 0."""
        return RopeConfig(size=self.size, type="none")


class Ropes(msgspec.Struct, frozen=True):
    """Of the layers that see everything, and of those with a window."""

    whole: RopeConfig
    windowed: RopeConfig
    max_positions: int
    """Longest sequence in tokens, stretched."""


def parse_ropes(raw: Mapping[str, Any], head_size: int, positions: int) -> Ropes:
    """Reads `config.json`'s object.

    Args:
        raw: The object.
        head_size: Elements of a head.
        positions: `max_position_embeddings`.

    Raises:
        ConfigError: A field is missing, or the type is not implemented; the message names it.
    """
    parameters = raw.get("rope_parameters") or {}
    if "full_attention" in parameters:
        whole, windowed = (
            _parse(raw, f"rope_parameters.{kind}", parameters.get(kind) or {}, head_size, positions)
            for kind in ("full_attention", "sliding_attention")
        )
        return Ropes(whole, windowed, positions)
    field = "rope_parameters" if parameters else "rope_scaling"
    whole = _parse(raw, field, parameters or raw.get("rope_scaling") or {}, head_size, positions)
    if (local := raw.get("rope_local_base_freq")) is not None:
        # Gemma 3 states the stretched length already.
        return Ropes(whole, RopeConfig(size=whole.size, theta=float(local)), positions)
    return Ropes(whole, whole, _stretched(whole, positions))


def _stretched(rope: RopeConfig, positions: int) -> int:
    """llama3 and longrope state the stretched length, linear and dynamic the one before; yarn is written in both ways."""
    if rope.type in ("linear", "dynamic"):
        return int(positions * rope.factor)
    if rope.type == "yarn":
        return max(positions, int(rope.original_max_position_embeddings * rope.factor))
    return positions


def _parse(raw: Mapping[str, Any], field: str, scaling: Mapping[str, Any], head_size: int, positions: int) -> RopeConfig:
    named = scaling.get("rope_type", scaling.get("type", "default"))
    kind = _ALIASES.get(named, named)
    if kind not in _NEEDED:
        raise ConfigError(f"config.json: {field} has the type {named!r} (supported: {', '.join(_NEEDED)})")
    missing = [name for name in _NEEDED[kind] if name not in scaling]
    if missing:
        raise ConfigError(f"config.json: {field} of type {kind!r} lacks {', '.join(missing)}")
    partial = float(scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)))
    size = int(head_size * partial)
    if size % 2 or not 0 < size <= head_size:
        raise ConfigError(
            f"config.json: partial_rotary_factor {partial} of head_dim {head_size} rotates {size} elements, not pairs"
        )
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    sections = _sections(scaling, field, size)
    interleaved = bool(sections) and bool(scaling.get("mrope_interleaved"))
    base = RopeConfig(size=size, type=kind, theta=theta, sections=sections, interleaved_sections=interleaved)
    if kind == "default":
        return base
    original = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or positions
    factor = float(scaling.get("factor") or positions / original)
    base = msgspec.structs.replace(base, factor=factor, original_max_position_embeddings=original)
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        return msgspec.structs.replace(base, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return _parse_yarn(base, scaling)
    return _parse_longrope(base, scaling, field) if kind == "longrope" else base


def _sections(scaling: Mapping[str, Any], field: str, size: int) -> tuple[int, ...]:
    found = scaling.get("mrope_section")
    if found is None:
        return ()
    if len(found) != 3 or sum(found) != size // 2:
        raise ConfigError(f"config.json: {field}.mrope_section {found} must be three numbers whose sum is {size // 2}")
    if scaling.get("mrope_interleaved") and max(found[1:]) > found[0]:
        raise ConfigError(f"config.json: {field}.mrope_section {found} has fewer pairs for time than for rows or columns")
    return tuple(int(pairs) for pairs in found)


def _parse_yarn(base: RopeConfig, scaling: Mapping[str, Any]) -> RopeConfig:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(base.factor) + 1.0 if base.factor > 1 else 1.0

    attention, over = scaling.get("attention_factor"), scaling.get("mscale_all_dim")
    if attention is None:
        of = scaling.get("mscale")
        attention = mscale(of) / mscale(over) if of and over else mscale(1.0)
    return msgspec.structs.replace(
        base,
        attention_factor=float(attention),
        latent_factor=mscale(over) ** 2 if over else 1.0,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
    )


def _parse_longrope(base: RopeConfig, scaling: Mapping[str, Any], field: str) -> RopeConfig:
    factors = {name: tuple(float(factor) for factor in scaling[name]) for name in ("short_factor", "long_factor")}
    for name, values in factors.items():
        if len(values) != base.size // 2:
            raise ConfigError(
                f"config.json: {field} has {len(values)} numbers in {name}, not {base.size // 2}: half of what rotates"
            )
    attention = scaling.get("attention_factor")
    if attention is None:
        stretch = math.log(max(base.factor, 1.0)) / math.log(base.original_max_position_embeddings)
        attention = math.sqrt(1 + stretch)
    return msgspec.structs.replace(base, attention_factor=float(attention), **factors)
