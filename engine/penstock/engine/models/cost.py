"""A decoder's cost by its configuration. No torch."""

from collections import Counter

from penstock.engine.config import DType, KVDType
from penstock.engine.cost import ModelCost, WindowCost
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.kv import SCALE_BYTES
from penstock.engine.quant.scheme import CheckpointQuantization, QuantizationName

_BYTES: dict[KVDType, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8_per_token_head": 1,
}
_QUANTIZED_BYTES: dict[QuantizationName, float] = {
    "int8_per_channel_weight_only": 1.0,
    "int8_per_group_32": 1.0 + 2 / 32,
    "int4_per_group_32": 0.5 + 2 / 32,
    "fp8_per_tensor": 1.0,
    "fp8_per_channel": 1.0,
    "fp8_per_block": 1.0 + 4 / 128,
}
"""Of a weight with its share of a group's scale; the scales of whole channels are too few to count."""


def model_cost(
    config: DecoderConfig, dtype: DType, kv_dtype: KVDType, quantization: QuantizationName | CheckpointQuantization | None = None
) -> ModelCost:
    """For activations of one type, keys and values of the same or another one, and weights as `quantization` stores them."""
    if isinstance(quantization, CheckpointQuantization):
        weight_bytes = quantization.weight_bytes
    else:
        weight_bytes = _BYTES[dtype] if quantization is None else _QUANTIZED_BYTES[quantization]
    hidden, heads, kv_heads = config.hidden_size, config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    attention, kv_size, pair = hidden * (heads + 2 * kv_heads) + heads * hidden, 2 * kv_heads, 4 * heads
    rows = 2 * config.num_kv_heads  # of a token in a layer of the cache
    expansion = 0  # of a latent, which is held in the model's dtype
    if (latent := config.latent) is not None:
        source = hidden if latent.query_rank is None else latent.query_rank
        expansion = config.num_heads * latent.rank * (latent.nope_size + latent.value_size)
        own = config.num_heads * (latent.head_size * source + latent.value_size * hidden)
        attention = own + expansion + hidden * ((latent.query_rank or 0) + latent.key_size)
        rows, kv_size, pair = 1, latent.key_size, 2 * config.num_heads * (latent.key_size + latent.rank)
    mlp = (3 if config.gated_mlp else 2) * hidden * config.intermediate_size
    multiplied = stored = config.num_layers * (attention + mlp)
    if (experts := config.experts) is not None:
        layers, expert = sum(experts.layers), 3 * hidden * experts.intermediate_size
        beside = hidden * experts.count + 3 * hidden * experts.shared_size - mlp
        multiplied += layers * (beside + experts.top_k * expert)
        stored += layers * (beside + experts.count * expert)
    lm_head = hidden * config.vocab_size
    kept = kv_size * _BYTES[kv_dtype] + rows * SCALE_BYTES.get(kv_dtype, 0)
    return ModelCost(
        linear_flops_per_token=2 * multiplied,
        lm_head_flops_per_row=2 * lm_head,
        layer_weight_bytes=int(stored * weight_bytes + config.num_layers * expansion * (_BYTES[dtype] - weight_bytes)),
        lm_head_bytes=lm_head * _BYTES[dtype],
        windows=tuple(
            WindowCost(window, flops_per_pair=pair * layers, kv_bytes_per_token=kept * layers)
            for window, layers in Counter(config.windows).items()
        ),
    )
