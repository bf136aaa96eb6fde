"""The engine's settings as people give them: the flags of `penstock serve` and the keyword arguments of `LLM` alike."""

from typing import Annotated, Any, Literal

import msgspec

from penstock.engine.config import (
    AttentionBackendName,
    CudagraphMode,
    DType,
    EngineConfig,
    KVDType,
    LoadFormat,
    LogprobsMode,
    RunnerType,
    SchedulingPolicy,
)
from penstock.engine.connectors.eviction import PolicyName
from penstock.engine.quant.scheme import QuantizationName, StoredMethod
from penstock.kernels.cpu.isa import IsaName

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Named as the flags, with their defaults; `docs/engine/serve.md` says what they do."""

    model: str
    """A folder in Hugging Face format, `org/name` on the Hub, `file://…`, `hf://org/name` or `s3://bucket/path`."""
    revision: str | None = None
    """Branch, tag or commit, for hf:// alone."""
    tokenizer: str | None = None
    """A folder with a tokenizer and chat template to use in place of the model's."""
    served_model_name: list[str] | None = None
    """None: the model as it was given."""
    dtype: DType | Literal["auto"] = "auto"
    load_format: LoadFormat = "auto"
    quantization: QuantizationName | StoredMethod | None = None
    """None: weights stay as the checkpoint has them."""
    runner: RunnerType = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a CUDA device where one serves."""
    cpu_isa: IsaName | Literal["auto"] = "auto"
    """auto: the best instruction set that the CPU has."""
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
    """Whether the next step is planned while one runs. None: on a GPU, and not on a CPU, whose cores the model needs."""
    block_size: Positive = 16
    kv_cache_dtype: KVDType | Literal["auto", "fp8"] = "auto"
    """Of keys and values; `auto` is the model's."""
    num_gpu_blocks_override: Positive | None = None
    kv_cache_memory_bytes: Positive | None = None
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    enable_prefix_caching: bool = True
    kv_offload_memory_bytes: Count = 0
    """Of the host's memory, for pages that leave the KV cache."""
    kv_offload_directory: str | None = None
    kv_offload_disk_bytes: Count = 0
    """Of the disk, for copies of these pages."""
    kv_offload_store: str | None = None
    """`mooncake://HOST:PORT` or `lmcache://HOST:PORT` of a store for copies of these pages that other replicas find, too."""
    kv_offload_store_bytes: Count = 0
    """Of the pages there that this replica knows."""
    kv_offload_bucket: str | None = None
    """`s3://BUCKET/PATH` for copies of these pages that other replicas find, too."""
    kv_offload_bucket_bytes: Count = 0
    """Of the object store, that this replica uses."""
    kv_offload_loads: Literal["cost", "always"] = "cost"
    """When pages come back from there: where that is faster than to compute their tokens, or always."""
    kv_offload_eviction_policy: PolicyName = "lru"
    """Which page leaves a tier that is full."""
    kv_offload_threshold: Count = 0
    """Requests that must have shown a block in their prompts before it is copied there."""
    kv_transfer_config: dict[str, Any] | None = None
    """vLLM's keys; None: no pages go to other replicas."""
    kv_transfer_secret_file: str | None = None
    hash_seed: str = "penstock"
    seed: Count = 0
    generation_config: str = "auto"
    """Whose sampling is the default of requests: `auto` is the checkpoint's, `vllm` OpenAI's; else a folder."""
    override_generation_config: dict[str, Any] = {}
    """Fields that win over it."""
    watchdog_timeout: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: list[str] | None = None
    profile_dir: str | None = None
    attention_backend: AttentionBackendName | None = None
    prefill_attention_backend: AttentionBackendName | None = None
    enforce_eager: bool = False
    cudagraph_mode: CudagraphMode | None = None
    """None: `FULL_AND_PIECEWISE` on a GPU."""
    cudagraph_capture_sizes: list[Positive] | None = None
    max_cudagraph_capture_size: Positive | None = None
    structured_outputs_config: dict[str, Any] = {}
    """vLLM's keys, as `GrammarSettings` has them."""
    speculative_config: dict[str, Any] | None = None
    """vLLM's keys; None: no drafts, unless one of the next three asks for them."""
    spec_method: str | None = None
    spec_model: str | None = None
    spec_tokens: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    data_parallel_size_local: Positive | None = None
    """None: all data-parallel ranks are on this node."""
    data_parallel_start_rank: Count | None = None
    """None: the pod's place in the LeaderWorkerSet's group times `data_parallel_size_local`, or 0."""
    data_parallel_address: str | None = None
    """None: the group's leader."""
    data_parallel_rpc_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 29550
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    eplb_config: dict[str, Any] | None = None
    """With vLLM's keys."""
    worker_process: bool = False
    distributed_timeout_seconds: Annotated[int, msgspec.Meta(ge=1)] = 30
    nnodes: Positive | None = None
    """None: as many as the LeaderWorkerSet's group has pods, or 1."""
    node_rank: Count | None = None
    """None: the pod's place in the group, or 0."""
    master_addr: str | None = None
    """None: the group's leader."""
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 29501
    enable_lora: bool = False
    lora_modules: list[str] | None = None
    """`name=path` each."""
    max_loras: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    max_cpu_loras: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    """None: `max_loras`."""
    max_lora_rank: Annotated[int, msgspec.Meta(ge=1, le=512)] = 16
    limit_mm_per_prompt: dict[str, Count] = {}
    """`image`: how many a request may have; 0: none."""
    mm_processor_kwargs: dict[str, Any] = {}
    """Over `preprocessor_config.json`: `min_pixels` and `max_pixels` of models that read images in about their own size."""
    allowed_media_domains: list[str] | None = None
    """Host names from which images are fetched, by HTTPS."""

    def config(self, device: Literal["cpu", "cuda"] | None = None) -> EngineConfig:
        """The typed tree that they are a view of; reads the checkpoint's configuration.

        Args:
            device: For which it is meant, wherever this is; None: this machine's.

        Raises `ConfigError` for a value that makes no sense, and for a model that cannot be served.
        """
        from penstock.engine.args_config import engine_config

        return engine_config(self, device)
