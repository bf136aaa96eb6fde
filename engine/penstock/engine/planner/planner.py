"""Which layouts of a model on devices are possible, and what each can reach at best. Pure, and without torch.

What a rank holds is the engine's own arithmetic: its layers' bytes (`models.cost`), its pages (`cache.layout`) and the number of
its KV blocks (`core.memory`). Speeds are a roofline's (`roofline`): no layout reaches them.
"""

import math
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from penstock.engine.cache.layout import KVLayout, kv_layout, max_blocks
from penstock.engine.config import ConfigError, DType, EngineConfig
from penstock.engine.core.memory import Memory, num_kv_blocks
from penstock.engine.cost import StepCost
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.cost import embedding_bytes, layer_weights, lm_head_bytes, stage_sizes
from penstock.engine.models.kv import kv_layers
from penstock.engine.models.layers.shard import Shard, Stage
from penstock.engine.parallel.sizes import size_problem
from penstock.engine.roofline import Ceilings, floor_s
from penstock.engine.spec.checkpoint import DraftCheckpoint

_FLOAT32_BYTES: Final = 4
_BYTES: Final[dict[DType, int]] = {"bfloat16": 2, "float16": 2, "float32": 4}


class Device(msgspec.Struct, frozen=True):
    """One of the devices."""

    memory_bytes: int
    ceilings: Ceilings
    exchange_s: float
    """Seconds of one all-reduce or all-to-all, whatever its size."""


class Parallelism(msgspec.Struct, frozen=True, order=True):
    """How a model is spread over devices, with vLLM's names of sizes."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    """Whether routed experts are distributed whole over the tensor and data ranks of a stage."""

    def __str__(self) -> str:
        sizes = (("TP", self.tensor), ("PP", self.pipeline), ("DP", self.data))
        parts = [f"{name}{size}" for name, size in sizes if size > 1] or ["one device"]
        return " ".join([*parts, f"EP{self.tensor * self.data}"] if self.expert else parts)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a layout holds and can reach."""

    parallelism: Parallelism
    weight_bytes: int
    """Of the rank that holds most."""
    step_bytes: int
    """What its largest step takes beside, estimated; the engine measures it."""
    kv_blocks: int
    """Of a rank; data parallel replicas have as many each."""
    kv_tokens: int
    """Tokens of one replica's KV cache, where sequences are long."""
    max_concurrent: int
    """Sequences of the context that fit, over all replicas."""
    batch: int
    """Sequences that decode at once in a replica, for the next two."""
    tokens_per_s: float
    """Output tokens of all replicas together."""
    token_s: float
    """Seconds between two tokens of a request among so many."""
    lone_token_s: float
    """The same of a request that is alone."""
    bound: Literal["bandwidth", "compute", "exchanges"]


class Refusal(msgspec.Struct, frozen=True):
    """Why a layout is impossible."""

    parallelism: Parallelism
    problem: str


def layouts(config: DecoderConfig, devices: int, *, expert: bool) -> Iterator[Parallelism]:
    """All ways to spread a model over so many devices; `expert`: with whole experts too, where there are any."""
    for tensor in _divisors(devices):
        for pipeline in _divisors(devices // tensor):
            data = devices // tensor // pipeline
            yield Parallelism(tensor, pipeline, data)
            if expert and config.experts is not None and tensor * data > 1:
                yield Parallelism(tensor, pipeline, data, expert=True)


def estimate(
    engine: EngineConfig,
    config: DecoderConfig,
    parallelism: Parallelism,
    device: Device,
    context: int,
    redundant: int = 0,
    drafter: DraftCheckpoint | None = None,
) -> Estimate | Refusal:
    """What a layout holds and can reach, or why it is impossible.

    Args:
        engine: The engine's settings; `cache` says how much of the memory it uses.
        config: The model's shape.
        parallelism: The layout.
        device: Each of the devices.
        context: Tokens of a sequence, prompt and output together, on average.
        redundant: Copies of busy experts, over all ranks of a stage.
        drafter: A draft model or a head; `speculative` of the engine says how many tokens it drafts.
    """
    model, shard = engine.model, Shard(0, parallelism.tensor)
    drafts = 0.0 if drafter is None else drafter.step_bytes(engine.speculative, model.dtype, shard.world)
    if (problem := size_problem(config, parallelism.tensor, whole_experts=parallelism.expert)) is not None:
        return Refusal(parallelism, problem)
    try:
        stages = [Stage(rank, parallelism.pipeline) for rank in range(parallelism.pipeline)]
        sizes = stage_sizes(config, model.dtype, model.weight_quantization, drafts)
        spans = [stage.layers(sizes) for stage in stages]
    except ValueError as error:
        return Refusal(parallelism, str(error))
    held = _held_experts(config, parallelism, redundant)
    ranks = [_Rank(engine, config, shard, span, held, stage, drafter) for span, stage in zip(spans, stages, strict=True)]
    weights, step = max(rank.weight_bytes for rank in ranks), _step_bytes(engine, config, shard)
    memory = Memory(device.memory_bytes, device.memory_bytes - weights, weights, at_start=device.memory_bytes)
    layout = max((rank.layout for rank in ranks), key=lambda layout: layout.page_bytes)
    if weights + step > device.memory_bytes:
        total = f"{weights:,} bytes of weights + {step:,} for a step"
        return Refusal(parallelism, f"{total} > {device.memory_bytes:,} bytes of a device")
    try:
        blocks = num_kv_blocks(engine, layout, memory, step)
    except ConfigError as error:
        return Refusal(parallelism, str(error))
    in_flight = engine.max_in_flight
    fits = (blocks - 1) // max_blocks(layout.groups, context, in_flight)
    batch = min(fits, engine.scheduler.max_num_seqs)
    if not batch:
        return Refusal(parallelism, f"{blocks} KV blocks hold no sequence of {context} tokens")
    # Each stage works on its part of the batch.
    together = max(math.ceil(batch / parallelism.pipeline), 1)
    slowest = max((rank.decode(together, context, device, parallelism) for rank in ranks), key=lambda it: it[0])
    alone = sum(rank.decode(1, context, device, parallelism)[0] for rank in ranks)
    token_s = slowest[0] * parallelism.pipeline
    return Estimate(
        parallelism=parallelism,
        weight_bytes=weights,
        step_bytes=step,
        kv_blocks=blocks,
        kv_tokens=(blocks - 1) * model.max_model_len // max_blocks(layout.groups, model.max_model_len, in_flight),
        max_concurrent=fits * parallelism.data,
        batch=batch,
        tokens_per_s=parallelism.data * together / slowest[0],
        token_s=token_s,
        lone_token_s=alone,
        bound=slowest[1],
    )


def best(found: list[Estimate]) -> list[Estimate]:
    """In the order in which they are advised: most tokens a second first, and of equals the one with the fewest exchanges."""
    return sorted(found, key=lambda it: (-it.tokens_per_s, it.parallelism))


class _Rank:
    """The first rank of a stage: no other one of it holds more."""

    def __init__(
        self,
        engine: EngineConfig,
        config: DecoderConfig,
        shard: Shard,
        layers: range,
        experts: int | None,
        stage: Stage,
        drafter: DraftCheckpoint | None = None,
    ) -> None:
        self._config, self._layers, self._shard = config, layers, shard
        self._first, self._last = stage.first, stage.last
        model = engine.model
        weights = [layer_weights(config, layer, model.dtype, model.weight_quantization, shard, experts) for layer in layers]
        self._dense, self._experts = sum(it.dense for it in weights), sum(it.experts for it in weights)
        self._head = lm_head_bytes(config, model.dtype, shard) if stage.last else 0
        borrows = stage.last and drafter is not None and drafter.head is not None and not drafter.head.has_embedding
        embedding = embedding_bytes(config, model.dtype, shard) if stage.first or borrows else 0
        own = drafter.held_bytes(model) if stage.last and drafter is not None else 0
        self.weight_bytes = int(self._dense + self._experts) + self._head + embedding + own
        heads = shard.kv_heads(config.num_kv_heads).size
        self.layout = _layout(engine, config, heads, layers, stage, drafter)
        cost = model.cost
        assert cost is not None, "a plan needs the model's cost"
        share = len(layers) / config.num_layers
        self._flops = cost.linear_flops_per_token * share / shard.world
        self._head_flops = cost.lm_head_flops_per_row / shard.world if stage.last else 0.0
        part = 1.0 if config.latent is not None else heads / config.num_kv_heads
        self._kv_bytes = part * sum(it.kv_bytes_per_token for it in cost.windows) / config.num_layers
        self._pair_flops = sum(it.flops_per_pair for it in cost.windows) / config.num_layers / shard.world

    def decode(
        self, batch: int, context: int, device: Device, parallelism: Parallelism
    ) -> tuple[float, Literal["bandwidth", "compute", "exchanges"]]:
        """Seconds under which no step of so many decodes comes, and what bounds it."""
        seen = sum(min(context, window or context) for window in (self._config.windows[layer] for layer in self._layers))
        experts, tokens = self._experts, batch * (parallelism.data if parallelism.expert else 1)
        if (found := self._config.experts) is not None:
            # Each token chooses its experts as if by chance.
            experts *= 1 - (1 - found.top_k / found.count) ** tokens
        cost = StepCost(
            linear_flops=batch * self._flops,
            attention_flops=batch * seen * self._pair_flops,
            lm_head_flops=batch * self._head_flops,
            weight_bytes=self._dense + experts + self._head,
            kv_read_bytes=batch * seen * self._kv_bytes,
            kv_write_bytes=batch * len(self._layers) * self._kv_bytes,
        )
        work, ceilings = floor_s(cost, device.ceilings), device.ceilings
        exchanges = self._first + 2 * len(self._layers) + self._last if parallelism.tensor > 1 else 0
        if parallelism.expert:
            assert found is not None
            exchanges += 2 * sum(found.layers[layer] for layer in self._layers)
        waits = exchanges * device.exchange_s
        if waits > work:
            return work + waits, "exchanges"
        moves = cost.bytes / ceilings.bytes_per_s >= cost.flops / ceilings.flops_per_s
        return work + waits, "bandwidth" if moves else "compute"


def _layout(
    engine: EngineConfig, config: DecoderConfig, heads: int, layers: range, stage: Stage, drafter: DraftCheckpoint | None
) -> KVLayout:
    """Of the pages of a rank with so many KV heads: behind the target's layers those of what drafts, in the last stage."""
    length, kv_dtype = engine.model.max_model_len, engine.model.kv_dtype or engine.model.dtype
    kept = kv_layers(config, heads, kv_dtype, length)
    if drafter is not None:
        kept += kv_layers(drafter.config, drafter.config.num_kv_heads, kv_dtype, length)
    whole = kv_layout(kept, engine.cache.block_size)
    if stage.world == 1:
        return whole
    return whole.part({*layers, *(range(config.num_layers, len(kept)) if stage.last else ())})


def _held_experts(config: DecoderConfig, parallelism: Parallelism, redundant: int) -> int | None:
    """Whole experts of the rank that holds most, copies included; None: each rank has a part of every expert."""
    if not parallelism.expert or config.experts is None:
        return None
    return math.ceil((config.experts.count + redundant) / (parallelism.tensor * parallelism.data))


def _step_bytes(engine: EngineConfig, config: DecoderConfig, shard: Shard) -> int:
    """About what the largest step takes: hidden states and a residual stream, an MLP's inside, and logits in float32."""
    tokens, rows = engine.scheduler.max_num_batched_tokens, engine.scheduler.max_num_seqs
    inside = config.intermediate_size if config.experts is None else config.experts.top_k * config.experts.intermediate_size
    activations = tokens * (4 * config.hidden_size + 3 * math.ceil(inside / shard.world)) * _BYTES[engine.model.dtype]
    return activations + 2 * rows * config.vocab_size * _FLOAT32_BYTES


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
