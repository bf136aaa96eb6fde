"""The engine's settings as people give them: the flags of `penstock serve` and the keyword arguments of `LLM` alike."""

import logging
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from penstock.engine.config import CacheConfig, ConfigError, DType, EngineConfig, LogprobsMode, SchedulerConfig, SchedulingPolicy

_log = logging.getLogger(__name__)

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Named as the flags, with their defaults; `docs/engine/serve.md` says what they do."""

    model: str
    """A folder in Hugging Face format, `file://…` or `hf://org/name`."""
    served_model_name: list[str] | None = None
    """None: the model as it was given."""
    dtype: DType | Literal["auto"] = "auto"
    device: Literal["auto", "cpu"] = "auto"
    max_model_len: Positive | None = None
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 256
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 2048
    long_prefill_token_threshold: Count = 0
    enable_chunked_prefill: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_num_waiting: Count = 1024
    watermark: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.01
    tenant_weights: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    async_scheduling: bool | None = None
    """Whether the next step is planned while one runs. None: not on a CPU, whose cores the model needs."""
    block_size: Positive = 16
    num_gpu_blocks_override: Positive | None = None
    kv_cache_memory_bytes: Positive | None = None
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    enable_prefix_caching: bool = True
    hash_seed: str = "penstock"
    seed: Count = 0
    watchdog_timeout: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: list[str] | None = None
    profile_dir: str | None = None

    def config(self) -> EngineConfig:
        """The typed tree that they are a view of; reads the checkpoint's configuration.

        Raises `ConfigError` for a value that makes no sense, and for a model that cannot be served.
        """
        self._check()
        from penstock.engine.loading.checkpoint import read_model_config, resolve  # heavy for `penstock --help`

        names = self.served_model_name or [self.model]
        model = read_model_config(resolve(self.model), served_names=names, dtype=self.dtype, max_model_len=self.max_model_len)
        return EngineConfig(
            model=msgspec.structs.replace(model, logits_processors=tuple(self.logits_processors or ())),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_gpu_blocks_override,
                memory_bytes=self.kv_cache_memory_bytes,
                memory_utilization=self.gpu_memory_utilization,
                enable_prefix_caching=self.enable_prefix_caching,
                hash_seed=self.hash_seed,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                enable_chunked_prefill=self.enable_chunked_prefill,
                policy=self.scheduling_policy,
                max_num_waiting=self.max_num_waiting,
                watermark=self.watermark,
                tenant_weights=self.tenant_weights,
            ),
            depth=self._depth(),
            seed=self.seed,
            profile_dir=Path(self.profile_dir) if self.profile_dir is not None else None,
            watchdog_timeout=self.watchdog_timeout,
            logprobs_mode=self.logprobs_mode,
        )

    def _depth(self) -> int:
        """Plans in flight."""
        if self.async_scheduling is None:
            _log.info("async scheduling: off, since on a CPU the scheduler would take the model's cores (--async-scheduling)")
        return 2 if self.async_scheduling else 1

    def _check(self) -> None:
        """As the flags' parser does; types and limits are those of the fields."""
        for field in msgspec.structs.fields(EngineArgs):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{field.name}: {error}") from None
