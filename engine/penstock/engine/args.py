"""The engine's settings as people give them: the flags of `penstock serve` and the keyword arguments of `LLM` alike."""

from pathlib import Path
from typing import Literal

import msgspec

from penstock.engine.config import CacheConfig, DType, EngineConfig, LogprobsMode, SchedulerConfig, SchedulingPolicy


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Named as the flags, with their defaults; `docs/engine/serve.md` says what they do."""

    model: str
    """A folder in Hugging Face format, `file://…` or `hf://org/name`."""
    served_model_name: list[str] | None = None
    """None: the model as it was given."""
    dtype: DType | Literal["auto"] = "auto"
    device: Literal["auto", "cpu"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_num_waiting: int = 1024
    watermark: float = 0.01
    tenant_weights: dict[str, float] = {}
    async_scheduling: bool | None = None
    """Whether the next step is planned while one runs. None: not on a CPU, whose cores the model needs."""
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    hash_seed: str = "penstock"
    seed: int = 0
    watchdog_timeout: float = 120.0
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: list[str] | None = None
    profile_dir: str | None = None

    def config(self) -> EngineConfig:
        """The typed tree that they are a view of; reads the checkpoint's configuration.

        Raises `ConfigError` for a model that cannot be served.
        """
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
            depth=2 if self.async_scheduling else 1,
            seed=self.seed,
            profile_dir=Path(self.profile_dir) if self.profile_dir is not None else None,
            watchdog_timeout=self.watchdog_timeout,
            logprobs_mode=self.logprobs_mode,
        )
