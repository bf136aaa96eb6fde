"""What a decoder's layers keep in the KV cache. No torch."""

from penstock.engine.cache.layout import TOKENS, KVLayer, Plane, attention_plane
from penstock.engine.models.config import DecoderConfig

_TORCH = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8_per_token_head": "int8"}
"""Names that torch spells otherwise."""
SCALE_BYTES: dict[str, int] = {"int8_per_token_head": 4}
"""Of a scale that stands behind a token's numbers, by dtype of the cache; see `penstock.kernels.prepare_kv.cache_rows`."""


def kv_layers(config: DecoderConfig, num_kv_heads: int, dtype: str, longest: int) -> list[KVLayer]:
    """By layer.

    Args:
        config: The model's shape.
        num_kv_heads: The rank's.
        dtype: Of the cache, which need not be the model's.
        longest: Tokens of a sequence at most. A window over all of them is none, and caches prefixes better.
    """
    stored, scale = _TORCH.get(dtype, dtype), SCALE_BYTES.get(dtype, 0)
    plane = attention_plane(num_kv_heads, config.head_size + scale, stored)
    if config.latent is not None:
        # Values are a part of the keys, and every rank has the whole latent.
        plane = Plane(plane.name, stored, (1, 1, TOKENS, config.latent.key_size + scale))
    windows = (window if window is not None and window < longest else None for window in config.windows)
    return [KVLayer(planes=(plane,), window=window) for window in windows]
