"""A decoder's cost by its configuration. No torch."""

from collections import Counter
from typing import Final, NamedTuple

from penstock.engine.config import DType, KVDType
from penstock.engine.cost import ModelCost, WindowCost
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.head_config import HeadConfig
from penstock.engine.models.kv import SCALE_BYTES
from penstock.engine.models.latent_config import LatentConfig
from penstock.engine.models.layers.shard import Shard
from penstock.engine.quant.scheme import CheckpointQuantization, QuantizationName

_WHOLE: Final = Shard()
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


class LayerWeights(NamedTuple):
    """Bytes of a layer's weights on one rank; norms and biases are too few to count."""

    dense: float
    """Read by every step."""
    experts: float
    """Of routed experts: a step reads those that its tokens choose."""


def model_cost(
    config: DecoderConfig, dtype: DType, kv_dtype: KVDType, quantization: QuantizationName | CheckpointQuantization | None = None
) -> ModelCost:
    """For activations of one type, keys and values of the same or another one, and weights as `quantization` stores them."""
    hidden, heads, kv_heads = config.hidden_size, config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    attention, kv_size, pair = hidden * (heads + 2 * kv_heads) + heads * hidden, 2 * kv_heads, 4 * heads
    rows = 2 * config.num_kv_heads  # of a token in a layer of the cache
    if (latent := config.latent) is not None:
        own, expansion, shared = _latent_elements(config, latent, config.num_heads)
        attention = own + expansion + shared
        rows, kv_size, pair = 1, latent.key_size, 2 * config.num_heads * (latent.key_size + latent.rank)
    mlp = (3 if config.gated_mlp else 2) * hidden * config.intermediate_size
    multiplied = config.num_layers * (attention + mlp)
    if (experts := config.experts) is not None:
        beside = hidden * experts.count + 3 * hidden * experts.shared_size - mlp
        multiplied += sum(experts.layers) * (beside + experts.top_k * 3 * hidden * experts.intermediate_size)
    lm_head = hidden * config.vocab_size
    kept = kv_size * _BYTES[kv_dtype] + rows * SCALE_BYTES.get(kv_dtype, 0)
    weights = [layer_weights(config, layer, dtype, quantization) for layer in range(config.num_layers)]
    return ModelCost(
        linear_flops_per_token=2 * multiplied,
        lm_head_flops_per_row=2 * lm_head,
        layer_weight_bytes=int(sum(dense + experts for dense, experts in weights)),
        lm_head_bytes=lm_head * _BYTES[dtype],
        windows=tuple(
            WindowCost(window, flops_per_pair=pair * layers, kv_bytes_per_token=kept * layers)
            for window, layers in Counter(config.windows).items()
        ),
    )


def layer_weights(
    config: DecoderConfig,
    layer: int,
    dtype: DType,
    quantization: QuantizationName | CheckpointQuantization | None = None,
    shard: Shard = _WHOLE,
    experts: int | None = None,
) -> LayerWeights:
    """What one rank holds of a layer.

    Args:
        config: The model's shape.
        layer: Its number.
        dtype: Of weights that are not quantized.
        quantization: How the others are stored.
        shard: The rank's part of every layer.
        experts: Whole experts of the rank (expert parallelism); None: its part of each.

    Raises:
        ValueError: The layer cannot be divided among the ranks.
    """
    each = weight_bytes(dtype, quantization)
    hidden, heads = config.hidden_size, shard.span(config.num_heads, "num_attention_heads").size
    kv_heads = shard.kv_heads(config.num_kv_heads).size
    dense, plain = hidden * config.head_size * (2 * heads + 2 * kv_heads), 0
    if (latent := config.latent) is not None:
        # The latent's expansion is held in the model's dtype, whatever the quantization.
        own, plain, shared = _latent_elements(config, latent, heads)
        dense = own + shared
    routed = 0
    if config.experts is not None and config.experts.layers[layer]:
        expert, found = 3 * hidden * config.experts.intermediate_size, config.experts
        dense += hidden * found.count + 3 * hidden * found.shared_size // shard.world
        routed = found.count * expert // shard.world if experts is None else experts * expert
    else:
        dense += (3 if config.gated_mlp else 2) * hidden * config.intermediate_size // shard.world
    return LayerWeights(dense * each + plain * _BYTES[dtype], routed * each)


def stage_sizes(
    config: DecoderConfig,
    dtype: DType,
    quantization: QuantizationName | CheckpointQuantization | None = None,
    drafts: float = 0.0,
    *,
    lm_head: bool = True,
) -> list[float]:
    """Bytes of weights that a step reads in each layer, with the LM head, if there is one, and what the drafts of a step read
    behind the last: what pipeline stages divide."""
    sizes = [sum(layer_weights(config, layer, dtype, quantization)) for layer in range(config.num_layers)]
    sizes[-1] += (lm_head_bytes(config, dtype) if lm_head else 0) + drafts
    return sizes


def draft_bytes(config: DecoderConfig, dtype: DType, logits: int) -> float:
    """Bytes of weights that a pass of a draft model or a head reads, which has so many logits. All of it is on every rank."""
    layers = sum(sum(layer_weights(config, layer, dtype)) for layer in range(config.num_layers))
    return layers + logits * config.hidden_size * _BYTES[dtype]


def held_draft_bytes(
    config: DecoderConfig, head: HeadConfig | None, dtype: DType, quantization: CheckpointQuantization | None = None
) -> int:
    """Bytes of all weights of a draft model or a head, as `layer_weights` counts. All of it is on every rank of the last stage.

    Args:
        config: Of the layers.
        head: None: a draft model.
        dtype: Of weights that are not quantized.
        quantization: How the others are stored.
    """
    each, hidden = _BYTES[dtype], config.hidden_size
    layers = sum(sum(layer_weights(config, layer, dtype, quantization)) for layer in range(config.num_layers))
    if head is None:
        return int(layers) + 2 * embedding_bytes(config, dtype)
    joined = head.states_size + (0 if head.kind == "eagle3" else hidden)
    if head.kind == "eagle3":  # attention sees the embedding beside the state
        layers += hidden * config.head_size * (config.num_heads + 2 * config.num_kv_heads) * each
    logits = head.draft_vocab_size * hidden * each if head.has_lm_head else 0
    embedding = embedding_bytes(config, dtype) if head.has_embedding else 0
    return int(layers + joined * hidden * weight_bytes(dtype, quantization)) + logits + embedding


def embedding_bytes(config: DecoderConfig, dtype: DType, shard: Shard = _WHOLE) -> int:
    """Bytes of a rank's part of the embedding, on the first stage; with others it has two rows that stand for their tokens."""
    rows = shard.padded(config.vocab_size).size + (0 if shard.world == 1 else 2)
    return rows * config.hidden_size * _BYTES[dtype]


def lm_head_bytes(config: DecoderConfig, dtype: DType, shard: Shard = _WHOLE) -> int:
    """Bytes of a rank's part of the LM head, on the last stage."""
    return shard.padded(config.vocab_size).size * config.hidden_size * _BYTES[dtype]


def weight_bytes(dtype: DType, quantization: QuantizationName | CheckpointQuantization | None) -> float:
    """Bytes of one weight of a layer."""
    if isinstance(quantization, CheckpointQuantization):
        return quantization.weight_bytes
    return _BYTES[dtype] if quantization is None else _QUANTIZED_BYTES[quantization]


def _latent_elements(config: DecoderConfig, latent: LatentConfig, heads: int) -> tuple[int, int, int]:
    """Of latent attention: the projections of so many heads, what expands the latent for them, and what all heads share."""
    source = config.hidden_size if latent.query_rank is None else latent.query_rank
    own = heads * (latent.head_size * source + latent.value_size * config.hidden_size)
    expansion = heads * latent.rank * (latent.nope_size + latent.value_size)
    return own, expansion, config.hidden_size * ((latent.query_rank or 0) + latent.key_size)
