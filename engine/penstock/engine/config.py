"""The engine's configuration: one typed tree, made once at start. CLI flags and the InferenceModel's fields are views of it."""

from pathlib import Path
from typing import Literal

import msgspec

from penstock.engine.cost import ModelCost

DType = Literal["bfloat16", "float16", "float32"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
"""What is reported as a token's logprob: its log probability or its logit, as the model gave it or as it was sampled from, after
masks, penalties, temperature and filters."""
SchedulingPolicy = Literal["fcfs", "priority"]


class ConfigError(ValueError):
    """A setting that cannot work; the message names the flag and what to change."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint and how it is served."""

    path: Path
    """Local folder in Hugging Face format."""
    served_names: tuple[str, ...]
    architecture: str
    """`architectures[0]` of config.json."""
    dtype: DType
    max_model_len: int
    """Tokens of prompt and output together."""
    eos_token_ids: tuple[int, ...]
    cost: ModelCost | None = None
    """None: not known, and then not estimated."""
    logits_processors: tuple[str, ...] = ()
    """`module:Class` of each, as `runner.sampler.custom` has it."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Paged KV cache and prefix cache."""

    block_size: int = 16
    num_blocks: int | None = None
    """None: from `memory_bytes`."""
    memory_bytes: int | None = None
    """None: from `memory_utilization`."""
    memory_utilization: float | None = None
    """Share of the device's memory for weights, steps and cache together. None: a tenth of the memory for the cache alone, as
    others use a host's memory too."""
    enable_prefix_caching: bool = True
    hash_seed: str = "penstock"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step."""

    policy: SchedulingPolicy = "fcfs"
    """Who is served first among a tenant's requests: by arrival alone, or by `priority` and then arrival."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    """Prompt tokens of one request in a step at most; 0: no cap."""
    enable_chunked_prefill: bool = True
    """Off: a prompt is computed in one step or not yet."""
    max_num_waiting: int = 1024
    """Requests in the queue beyond which new ones are refused with 503."""
    watermark: float = 0.01
    """Share of the blocks kept free when a request is admitted, so that running ones can grow before any is preempted."""
    tenant_weights: dict[str, float] = {}
    """Shares of tenants in comparison with the others; 1 for those that are not named."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the core process needs; travels to it as msgpack."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: Literal["cpu"] = "cpu"
    depth: int = 1
    """Plans in flight: 1 waits for each step's result, 2 plans the next step while one runs."""
    threads: int = 1
    """OpenMP threads of the core; more than one pays only on cores that nobody else uses."""
    seed: int = 0
    watchdog_timeout: float = 120.0
    """Seconds without a step, while there is work, after which the engine counts as hung."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    profile_dir: Path | None = None
    """Where profiles are written; None: none are made."""

    @property
    def max_in_flight(self) -> int:
        """Tokens of one request at most that are planned and not yet retired."""
        return self.depth * self.scheduler.max_num_batched_tokens
