"""The engine's settings as people give them: the flags of `penstock serve` and the keyword arguments of `LLM` alike."""

import logging
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from penstock.engine.config import (
    AttentionBackendName,
    CacheConfig,
    ConfigError,
    CudagraphMode,
    DType,
    EngineConfig,
    EplbConfig,
    GraphConfig,
    KVDType,
    LoadFormat,
    LogprobsMode,
    LoraConfig,
    LoraModule,
    ModelConfig,
    ParallelConfig,
    RunnerType,
    SchedulerConfig,
    SchedulingPolicy,
    TransferConfig,
)
from penstock.engine.connectors.eviction import PolicyName
from penstock.engine.connectors.page_objects import bucket_and_path
from penstock.engine.connectors.store_address import store_address
from penstock.engine.connectors.transfer.config import transfer_config
from penstock.engine.devices import choose_device
from penstock.engine.grammar import GrammarSettings, is_installed
from penstock.engine.multimodal.settings import ImageSettings
from penstock.engine.parallel.eplb_settings import eplb_config
from penstock.engine.parallel.nodes import placed
from penstock.engine.quant.scheme import QuantizationName, StoredMethod
from penstock.engine.runner.device.graphs.settings import graph_config
from penstock.kernels.cpu.isa import IsaName, choose
from penstock.plain_errors import explained

_log = logging.getLogger(__name__)

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
        self._check()
        # Heavy for `penstock --help`.
        from penstock.engine.loading.checkpoint import read_model_config, resolve
        from penstock.engine.spec.checkpoint import DraftCheckpoint, check_drafter, verifier
        from penstock.engine.spec.settings import speculative_config

        names = self.served_model_name or [self.model]
        device = device or choose_device(self.device)
        folder = resolve(self.model, self.revision)
        if (target := verifier(folder)) is not None:
            return self._with_head(target, names).config(device)
        model = read_model_config(
            folder,
            served_names=names,
            dtype=self.dtype,
            kv_dtype="fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype,
            max_model_len=self.max_model_len,
            load_format=self.load_format,
            quantization=self.quantization,
            runner=self.runner,
            generation_config=self.generation_config,
            override_generation_config=self.override_generation_config,
            mm_processor_kwargs=self.mm_processor_kwargs,
        )
        self._check_ranks(folder, model.architecture, device)
        images = self._images(model.images, device)
        source = self.model.removeprefix("hf://").removeprefix("file://")
        speculative = speculative_config(self.speculative_config, self.spec_method, self.spec_tokens, self.spec_model, model)
        if model.pooling is not None:
            self._check_pooling(device)
        self._check_cache_dtype(model, device)
        if self.kv_offload_memory_bytes and device == "cuda":
            raise ConfigError("--kv-offload-memory-bytes: pages are kept on a CPU alone so far (--device cpu)")
        if self.kv_offload_memory_bytes and not self.enable_prefix_caching:
            raise ConfigError("--kv-offload-memory-bytes keeps what the prefix cache finds: it needs --enable-prefix-caching")
        self._check_lower_tiers()
        tokenizer = None if self.tokenizer is None else Path(self.tokenizer)
        model = msgspec.structs.replace(model, images=images, tokenizer=tokenizer)
        drafter = DraftCheckpoint.read(speculative, model)
        depth = self._depth(device, has_drafter=drafter is not None)
        if images is not None and images.two_way:
            self._check_whole_images(images.tokens, 0 if speculative is None else speculative.num_speculative_tokens)
        if drafter is not None:
            check_drafter(drafter, model)
            if images is not None and drafter.images is not None:
                both = msgspec.structs.replace(images, cost=drafter.tower_cost(model))
                model = msgspec.structs.replace(model, images=both)
        parallel = self._parallel()
        return EngineConfig(
            model=msgspec.structs.replace(
                model,
                grammars=self._grammars(),
                logits_processors=tuple(self.logits_processors or ()),
                source=source,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_gpu_blocks_override,
                memory_bytes=self.kv_cache_memory_bytes,
                memory_utilization=self.gpu_memory_utilization,
                enable_prefix_caching=self.enable_prefix_caching,
                hash_seed=self.hash_seed,
                offload_bytes=self.kv_offload_memory_bytes,
                disk_folder=None if self.kv_offload_directory is None else Path(self.kv_offload_directory).absolute(),
                disk_bytes=self.kv_offload_disk_bytes,
                store=self.kv_offload_store,
                store_bytes=self.kv_offload_store_bytes,
                bucket=self.kv_offload_bucket,
                bucket_bytes=self.kv_offload_bucket_bytes,
                loads_by_cost=self.kv_offload_loads == "cost",
                eviction_policy=self.kv_offload_eviction_policy,
                offload_threshold=self.kv_offload_threshold,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                enable_chunked_prefill=self.enable_chunked_prefill,
                policy=self.scheduling_policy,
                max_num_waiting=self.max_num_waiting,
                watermark=self.watermark,
                num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
                num_lookahead_tokens=0 if drafter is None or speculative is None else speculative.num_speculative_tokens,
                drafts_after_result=speculative is not None and (device == "cuda" or depth == 1),
                pipeline_stages=self.pipeline_parallel_size,
                tenant_weights=self.tenant_weights,
                max_encoder_tokens=0 if images is None else self.max_num_batched_tokens,
                encoder_cache_size=0 if images is None else max(self.max_num_batched_tokens, images.tokens),
                whole_images=images is not None and images.two_way,
                image_lookahead=int(images is not None and speculative is not None and speculative.has_head),
            ),
            transfer=self._transfer(model, parallel),
            lora=self._lora(names),
            speculative=speculative,
            parallel=parallel,
            device=device,
            attention_backend=self.attention_backend,
            prefill_attention_backend=self.prefill_attention_backend,
            cpu_isa=self._cpu_isa(device),
            graphs=self._graphs(cuda=device == "cuda"),
            depth=depth,
            seed=self.seed,
            profile_dir=Path(self.profile_dir) if self.profile_dir is not None else None,
            watchdog_timeout=self.watchdog_timeout,
            logprobs_mode=self.logprobs_mode,
        )

    def _with_head(self, target: str, names: list[str]) -> "EngineArgs":
        """These arguments where `model` is a draft head in speculators' format: its target is served under the head's name."""
        if self.spec_model is not None or "model" in (self.speculative_config or {}):
            raise ConfigError(
                f"{self.model} is a draft head itself: serve its target {target}, or leave out the other draft model"
            )
        _log.info("%s is a draft head: serving its target %s", self.model, target)
        return msgspec.structs.replace(self, model=target, revision=None, served_model_name=names, spec_model=self.model)

    def _images(self, settings: ImageSettings | None, device: Literal["cpu", "cuda"]) -> ImageSettings | None:
        """How images are taken; None: requests with images are refused."""
        limits = dict(self.limit_mm_per_prompt)
        limit = limits.pop("image", None)
        if others := [kind for kind, most in limits.items() if most]:
            raise ConfigError(f"--limit-mm-per-prompt: {', '.join(others)} cannot be read; image is the only kind")
        if settings is None:
            if limit or self.allowed_media_domains:
                raise ConfigError("--limit-mm-per-prompt and --allowed-media-domains: this model reads text alone")
            return None
        if device == "cuda":
            _log.warning("images are read on a CPU alone so far (--device cpu): requests with images are refused")
            return None
        if limit == 0:
            return None
        if not self.enable_chunked_prefill:
            raise ConfigError(
                "--no-enable-chunked-prefill: prompts with images need chunks (--limit-mm-per-prompt '{\"image\": 0}')"
            )
        domains = tuple(domain.lower() for domain in self.allowed_media_domains or ())
        if wrong := [domain for domain in domains if not re.fullmatch(r"[a-z0-9.-]+", domain)]:
            raise ConfigError(f"--allowed-media-domains {wrong[0]!r} is not a host name such as images.example")
        return msgspec.structs.replace(settings, limit=limit or settings.limit, allowed_domains=domains)

    def _check_whole_images(self, tokens: int, drafts: int) -> None:
        """Refuses limits under which an image might never have a step with room for all its tokens."""
        if 0 < self.long_prefill_token_threshold < tokens:
            raise ConfigError(
                f"--long-prefill-token-threshold {self.long_prefill_token_threshold}: this model reads the {tokens} tokens of an "
                f"image in one step; it must be 0, or {tokens} at least"
            )
        needed = tokens + (self.max_num_seqs - 1) * (1 + drafts)
        if self.max_num_batched_tokens < needed:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: this model reads the {tokens} tokens of an image in "
                f"one step, and {self.max_num_seqs - 1} other requests decode in it; it must be at least {needed}, or "
                "--max-num-seqs less"
            )

    def _grammars(self) -> GrammarSettings:
        """How grammars are enforced where a request says nothing."""
        given = self.structured_outputs_config
        if given.get("backend") == "auto":
            given = {name: value for name, value in given.items() if name != "backend"}
        try:
            settings = msgspec.convert(given, GrammarSettings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--structured-outputs-config: {explained(error, GrammarSettings)}") from None
        if settings.backend == "xgrammar" and not is_installed("xgrammar"):
            raise ConfigError("--structured-outputs-config: xgrammar is not installed: pip install penstock[xgrammar]")
        return settings

    def _check_lower_tiers(self) -> None:
        folder = self.kv_offload_directory, self.kv_offload_disk_bytes
        store = self.kv_offload_store, self.kv_offload_store_bytes
        bucket = self.kv_offload_bucket, self.kv_offload_bucket_bytes
        for place, what, size, (given, count) in (
            ("--kv-offload-directory", "the folder of the files", "--kv-offload-disk-bytes", folder),
            ("--kv-offload-store", "where the store is", "--kv-offload-store-bytes", store),
            ("--kv-offload-bucket", "where the objects are", "--kv-offload-bucket-bytes", bucket),
        ):
            if given is None and not count:
                continue
            if given is None:
                raise ConfigError(f"{size} needs {place}: {what}")
            if not count:
                raise ConfigError(f"{place} needs {size}: how much its pages may take")
            if not self.kv_offload_memory_bytes:
                raise ConfigError(f"{place} keeps copies of what is in host memory: it needs --kv-offload-memory-bytes")
        if self.kv_offload_threshold and not self.kv_offload_memory_bytes:
            raise ConfigError(
                "--kv-offload-threshold says which blocks are copied to host memory: it needs --kv-offload-memory-bytes"
            )
        if self.kv_offload_store is not None:
            store_address(self.kv_offload_store)
        if self.kv_offload_bucket is not None:
            bucket_and_path(self.kv_offload_bucket)

    def _transfer(self, model: ModelConfig, parallel: ParallelConfig) -> TransferConfig | None:
        """How pages go to other replicas; None: they do not."""
        if self.kv_transfer_config is None:
            if self.kv_transfer_secret_file is not None:
                raise ConfigError("--kv-transfer-secret-file needs --kv-transfer-config")
            return None
        if model.pooling is not None:
            raise ConfigError("--kv-transfer-config: an engine that embeds lends no pages")
        if not self.kv_offload_memory_bytes:
            raise ConfigError("--kv-transfer-config: pages travel through host memory; it needs --kv-offload-memory-bytes")
        ranks = parallel.world * parallel.data_parallel_size
        return transfer_config(self.kv_transfer_config, self.kv_transfer_secret_file, ranks, parallel.nnodes)

    def _check_cache_dtype(self, model: ModelConfig, device: Literal["cpu", "cuda"]) -> None:
        """Refuses a KV cache that no kernel reads."""
        asked = self.kv_cache_dtype
        if asked in ("auto", model.dtype):
            return
        if device == "cuda" and asked in ("bfloat16", "float16", "float32"):
            raise ConfigError(
                f"--kv-cache-dtype {asked}: on a GPU the cache has the model's dtype, {model.dtype}, or eight bits; "
                "use fp8_e4m3, fp8_e5m2 or int8_per_token_head"
            )
        if asked == "float16":
            raise ConfigError(
                f"--kv-cache-dtype float16: no kernel reads it beside --dtype {model.dtype}; "
                "use bfloat16, float32, fp8_e4m3, fp8_e5m2 or int8_per_token_head"
            )

    def _check_ranks(self, folder: Path, architecture: str, device: Literal["cpu", "cuda"]) -> None:
        """Refuses a number of ranks among which the model cannot be divided."""
        world, stages = self.tensor_parallel_size, self.pipeline_parallel_size
        if (copies := self.data_parallel_size) > 1 and device == "cuda":
            raise ConfigError(f"--data-parallel-size {copies}: several cores run on a CPU alone so far (--device cpu)")
        if world == stages == copies == 1 and not self.enable_expert_parallel:
            return
        from penstock.engine.loading.json_files import read_object
        from penstock.engine.models.config import parse_decoder_config
        from penstock.engine.parallel.sizes import check_experts, check_sizes, check_stages

        if device == "cuda":
            flag = f"--tensor-parallel-size {world}" if world > 1 else f"--pipeline-parallel-size {stages}"
            raise ConfigError(f"{flag}: several ranks run on a CPU alone so far (--device cpu)")
        config = parse_decoder_config(read_object(folder / "config.json"))
        if self.enable_expert_parallel:
            check_experts(architecture, config, world * copies, self._eplb())
            self._check_expert_parallel(stages, device)
        if world > 1:
            check_sizes(architecture, config, world, whole_experts=self.enable_expert_parallel)
        if stages > 1:
            check_stages(config, stages)
            self._check_pipeline(stages)

    def _eplb(self) -> EplbConfig | None:
        ranks, experts = self.tensor_parallel_size * self.data_parallel_size, self.enable_expert_parallel
        return eplb_config(self.eplb_config, enabled=self.enable_eplb, experts=experts, ranks=ranks)

    def _check_expert_parallel(self, stages: int, device: Literal["cpu", "cuda"]) -> None:
        """Refuses what ranks that divide experts cannot do so far."""
        if device == "cuda":
            raise ConfigError("--enable-expert-parallel: experts are divided on a CPU alone so far (--device cpu)")
        if stages > 1 and self.data_parallel_size > 1:
            raise ConfigError(
                f"--enable-expert-parallel with --data-parallel-size {self.data_parallel_size} does not go with "
                f"--pipeline-parallel-size {stages}: cores that divide experts make one step after the other, all together"
            )
        if self.async_scheduling and self.data_parallel_size > 1:
            raise ConfigError("--async-scheduling: cores that divide experts make one step after the other, all of them together")

    def _check_pipeline(self, stages: int) -> None:
        """Refuses what the stages of a pipeline cannot do."""
        if self.async_scheduling is False:
            raise ConfigError(f"--no-async-scheduling: --pipeline-parallel-size {stages} keeps a plan in flight for each stage")

    def _check_pooling(self, device: Literal["cpu", "cuda"]) -> None:
        """Refuses what an engine that embeds cannot do."""
        if device == "cuda":
            raise ConfigError("--runner pooling: this model is served for embeddings, so far on a CPU alone (--device cpu)")
        for flag, given in (
            ("--enable-lora", self.enable_lora),
            ("--speculative-config", self.speculative_config or self.spec_method or self.spec_tokens or self.spec_model),
            ("--logits-processors", self.logits_processors),
            ("--override-generation-config", self.override_generation_config),
        ):
            if given:
                raise ConfigError(f"{flag}: this model is served for embeddings, which have none (--runner generate)")

    def _cpu_isa(self, device: Literal["cpu", "cuda"]) -> IsaName | None:
        """The instruction set that was asked for, if any."""
        if self.cpu_isa == "auto":
            return None
        if device != "cpu":
            raise ConfigError(f"--cpu-isa {self.cpu_isa} needs --device cpu")
        try:
            return choose(self.cpu_isa).name
        except ValueError as error:
            raise ConfigError(f"--cpu-isa: {error}") from None

    def _depth(self, device: Literal["cpu", "cuda"], *, has_drafter: bool) -> int:
        """Plans in flight."""
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size
        if device == "cuda" and has_drafter:
            if self.async_scheduling:
                raise ConfigError(
                    "--async-scheduling: a draft model or a head on a device reads what a step has left before the next step; "
                    "remove one of the two"
                )
            return 1
        if self.async_scheduling is not None:
            return 2 if self.async_scheduling else 1
        if device == "cuda":
            return 2
        _log.info("async scheduling: off, since on a CPU the scheduler would take the model's cores (--async-scheduling)")
        return 1

    def _graphs(self, cuda: bool) -> GraphConfig:
        return graph_config(
            cuda=cuda,
            enforce_eager=self.enforce_eager,
            mode=self.cudagraph_mode,
            sizes=self.cudagraph_capture_sizes,
            largest=self.max_cudagraph_capture_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def _parallel(self) -> ParallelConfig:
        config = ParallelConfig(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            data_parallel_size=self.data_parallel_size,
            expert_parallel=self.enable_expert_parallel and self.tensor_parallel_size * self.data_parallel_size > 1,
            eplb=self._eplb(),
            worker_process=self.worker_process,
            timeout=self.distributed_timeout_seconds,
            master_port=self.master_port,
        )
        config = placed(config, self.nnodes, self.node_rank, self.master_addr, os.environ)
        if config.nnodes > 1 and (config.data_parallel_size > 1 or config.expert_parallel):
            flag = "--enable-expert-parallel" if config.expert_parallel else f"--data-parallel-size {self.data_parallel_size}"
            raise ConfigError(f"{flag} does not go with several nodes (--nnodes {config.nnodes}) so far")
        return config

    def _lora(self, served_names: list[str]) -> LoraConfig | None:
        if not self.enable_lora:
            if self.lora_modules:
                raise ConfigError("--lora-modules needs --enable-lora")
            return None
        host = self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
        if host < self.max_loras:
            raise ConfigError(f"--max-cpu-loras {host} is below --max-loras {self.max_loras}: what is on the device is there too")
        modules: dict[str, LoraModule] = {}
        for given in self.lora_modules or ():
            name, separator, uri = given.partition("=")
            if not (name and separator and uri):
                raise ConfigError(f"--lora-modules {given!r} is not NAME=PATH")
            if name in modules or name in served_names:
                raise ConfigError(f"--lora-modules: the name {name!r} is taken")
            modules[name] = LoraModule(name, uri)
        return LoraConfig(
            max_loras=self.max_loras, max_cpu_loras=host, max_lora_rank=self.max_lora_rank, modules=tuple(modules.values())
        )

    def _check(self) -> None:
        """Check types and limits of the fields, as the flags' parser does."""
        for field in msgspec.structs.fields(EngineArgs):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                wrong = explained(error, field.type)
                raise ConfigError(f"{field.name}{wrong.field}: {wrong.problem}") from None
