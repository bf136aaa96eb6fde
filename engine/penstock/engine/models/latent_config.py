"""Latent attention as a checkpoint's `config.json` describes it. No torch."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.engine.config import ConfigError
from penstock.engine.models.fields import whole_number


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values that all heads derive from one latent of each token; sizes in elements."""

    rank: int
    """Of the latent."""
    rope_size: int
    """Of a query's and of the token's key that rotates, beside the rest."""
    nope_size: int
    """Of a head's query and key that does not rotate."""
    value_size: int
    """Of a head's value."""
    query_rank: int | None
    """Of the latent that queries are derived from; None: from the hidden state itself."""
    interleaved: bool
    """Whether the checkpoint rotates neighbouring elements."""

    @property
    def key_size(self) -> int:
        """Of what the cache holds of a token: the rotated key, then the latent."""
        return self.rope_size + self.rank

    @property
    def head_size(self) -> int:
        """Of a head's query, rotated and not."""
        return self.nope_size + self.rope_size


def parse_latent(raw: Mapping[str, Any]) -> LatentConfig:
    """Reads `config.json`'s object, with the family's defaults in it; ConfigError names a field that is wrong."""
    rope_size = whole_number(raw, "qk_rope_head_dim")
    if rope_size % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim {rope_size} does not rotate whole pairs")
    return LatentConfig(
        rank=whole_number(raw, "kv_lora_rank"),
        rope_size=rope_size,
        nope_size=whole_number(raw, "qk_nope_head_dim"),
        value_size=whole_number(raw, "v_head_dim"),
        query_rank=None if raw.get("q_lora_rank") is None else whole_number(raw, "q_lora_rank"),
        interleaved=bool(raw.get("rope_interleave", True)),
    )
