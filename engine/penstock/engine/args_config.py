"""The typed tree of settings that the engine's arguments stand for. Heavy: `penstock --help` needs the arguments alone."""

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.engine.args_checks import (
    check_cache_dtype,
    check_offload,
    check_pooling,
    check_ranks,
    check_types,
    check_whole_images,
)
from penstock.engine.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    EplbConfig,
    GraphConfig,
    LoraConfig,
    LoraModule,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    TransferConfig,
)
from penstock.engine.connectors.transfer.config import transfer_config
from penstock.engine.devices import choose_device
from penstock.engine.grammar import GrammarSettings, is_installed
from penstock.engine.loading.checkpoint import read_model_config, resolve
from penstock.engine.multimodal.settings import ImageSettings
from penstock.engine.parallel.eplb_settings import eplb_config
from penstock.engine.parallel.nodes import cores_placed, placed
from penstock.engine.runner.device.graphs.settings import graph_config
from penstock.engine.spec.checkpoint import DraftCheckpoint, check_drafter, verifier
from penstock.engine.spec.settings import speculative_config
from penstock.kernels.cpu.isa import IsaName, choose
from penstock.plain_errors import explained

if TYPE_CHECKING:
    from penstock.engine.args import EngineArgs

_log = logging.getLogger(__name__)


def engine_config(args: "EngineArgs", device: Literal["cpu", "cuda"] | None) -> EngineConfig:
    """Return the typed tree of arguments; see `EngineArgs.config`."""
    check_types(args)
    names = args.served_model_name or [args.model]
    device = device or choose_device(args.device)
    folder = resolve(args.model, args.revision)
    if (target := verifier(folder)) is not None:
        return _with_head(args, target, names).config(device)
    model = _model(args, folder, names)
    eplb = _eplb(args)
    check_ranks(args, eplb, folder, model.architecture, device)
    images = _images(args, model.images, device)
    source = args.model.removeprefix("hf://").removeprefix("file://")
    speculative = speculative_config(args.speculative_config, args.spec_method, args.spec_tokens, args.spec_model, model)
    if model.pooling is not None:
        check_pooling(args, device)
    check_cache_dtype(args, model, device)
    check_offload(args, device)
    tokenizer = None if args.tokenizer is None else Path(args.tokenizer)
    model = msgspec.structs.replace(model, images=images, tokenizer=tokenizer)
    drafter = DraftCheckpoint.read(speculative, model)
    depth = _depth(args, device, has_drafter=drafter is not None)
    if images is not None and images.two_way:
        check_whole_images(args, images.tokens, 0 if speculative is None else speculative.num_speculative_tokens)
    if drafter is not None:
        check_drafter(drafter, model)
        if images is not None and drafter.images is not None:
            both = msgspec.structs.replace(images, cost=drafter.tower_cost(model))
            model = msgspec.structs.replace(model, images=both)
    parallel = _parallel(args, eplb)
    return EngineConfig(
        model=msgspec.structs.replace(
            model,
            grammars=_grammars(args),
            logits_processors=tuple(args.logits_processors or ()),
            source=source,
        ),
        cache=_cache(args),
        scheduler=_scheduler(args, images, speculative, device, depth, has_drafter=drafter is not None),
        transfer=_transfer(args, model, parallel),
        lora=_lora(args, names),
        speculative=speculative,
        parallel=parallel,
        device=device,
        attention_backend=args.attention_backend,
        prefill_attention_backend=args.prefill_attention_backend,
        cpu_isa=_cpu_isa(args, device),
        graphs=_graphs(args, cuda=device == "cuda"),
        depth=depth,
        seed=args.seed,
        profile_dir=Path(args.profile_dir) if args.profile_dir is not None else None,
        watchdog_timeout=args.watchdog_timeout,
        logprobs_mode=args.logprobs_mode,
    )


def _with_head(args: "EngineArgs", target: str, names: list[str]) -> "EngineArgs":
    """These arguments where `model` is a draft head in speculators' format: its target is served under the head's name."""
    if args.spec_model is not None or "model" in (args.speculative_config or {}):
        raise ConfigError(f"{args.model} is a draft head itself: serve its target {target}, or leave out the other draft model")
    _log.info("%s is a draft head: serving its target %s", args.model, target)
    return msgspec.structs.replace(args, model=target, revision=None, served_model_name=names, spec_model=args.model)


def _model(args: "EngineArgs", folder: Path, names: list[str]) -> ModelConfig:
    return read_model_config(
        folder,
        served_names=names,
        dtype=args.dtype,
        kv_dtype="fp8_e4m3" if args.kv_cache_dtype == "fp8" else args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        load_format=args.load_format,
        quantization=args.quantization,
        runner=args.runner,
        generation_config=args.generation_config,
        override_generation_config=args.override_generation_config,
        mm_processor_kwargs=args.mm_processor_kwargs,
    )


def _cache(args: "EngineArgs") -> CacheConfig:
    return CacheConfig(
        block_size=args.block_size,
        num_blocks=args.num_gpu_blocks_override,
        memory_bytes=args.kv_cache_memory_bytes,
        memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=args.enable_prefix_caching,
        hash_seed=args.hash_seed,
        offload_bytes=args.kv_offload_memory_bytes,
        disk_folder=None if args.kv_offload_directory is None else Path(args.kv_offload_directory).absolute(),
        disk_bytes=args.kv_offload_disk_bytes,
        store=args.kv_offload_store,
        store_bytes=args.kv_offload_store_bytes,
        bucket=args.kv_offload_bucket,
        bucket_bytes=args.kv_offload_bucket_bytes,
        loads_by_cost=args.kv_offload_loads == "cost",
        eviction_policy=args.kv_offload_eviction_policy,
        offload_threshold=args.kv_offload_threshold,
    )


def _scheduler(
    args: "EngineArgs",
    images: ImageSettings | None,
    speculative: SpeculativeConfig | None,
    device: Literal["cpu", "cuda"],
    depth: int,
    *,
    has_drafter: bool,
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=args.scheduling_policy,
        max_num_waiting=args.max_num_waiting,
        watermark=args.watermark,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
        num_lookahead_tokens=0 if speculative is None or not has_drafter else speculative.num_speculative_tokens,
        drafts_after_result=speculative is not None and (device == "cuda" or depth == 1),
        pipeline_stages=args.pipeline_parallel_size,
        tenant_weights=args.tenant_weights,
        max_encoder_tokens=0 if images is None else args.max_num_batched_tokens,
        encoder_cache_size=0 if images is None else max(args.max_num_batched_tokens, images.tokens),
        whole_images=images is not None and images.two_way,
        image_lookahead=int(images is not None and speculative is not None and speculative.has_head),
    )


def _images(args: "EngineArgs", settings: ImageSettings | None, device: Literal["cpu", "cuda"]) -> ImageSettings | None:
    """How images are taken; None: requests with images are refused."""
    limits = dict(args.limit_mm_per_prompt)
    limit = limits.pop("image", None)
    if others := [kind for kind, most in limits.items() if most]:
        raise ConfigError(f"--limit-mm-per-prompt: {', '.join(others)} cannot be read; image is the only kind")
    if settings is None:
        if limit or args.allowed_media_domains:
            raise ConfigError("--limit-mm-per-prompt and --allowed-media-domains: this model reads text alone")
        return None
    if device == "cuda":
        _log.warning("images are read on a CPU alone so far (--device cpu): requests with images are refused")
        return None
    if limit == 0:
        return None
    if not args.enable_chunked_prefill:
        raise ConfigError("--no-enable-chunked-prefill: prompts with images need chunks (--limit-mm-per-prompt '{\"image\": 0}')")
    domains = tuple(domain.lower() for domain in args.allowed_media_domains or ())
    if wrong := [domain for domain in domains if not re.fullmatch(r"[a-z0-9.-]+", domain)]:
        raise ConfigError(f"--allowed-media-domains {wrong[0]!r} is not a host name such as images.example")
    return msgspec.structs.replace(settings, limit=limit or settings.limit, allowed_domains=domains)


def _grammars(args: "EngineArgs") -> GrammarSettings:
    """How grammars are enforced where a request says nothing."""
    given = args.structured_outputs_config
    if given.get("backend") == "auto":
        given = {name: value for name, value in given.items() if name != "backend"}
    try:
        settings = msgspec.convert(given, GrammarSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--structured-outputs-config: {explained(error, GrammarSettings)}") from None
    if settings.backend == "xgrammar" and not is_installed("xgrammar"):
        raise ConfigError("--structured-outputs-config: xgrammar is not installed: pip install penstock[xgrammar]")
    return settings


def _transfer(args: "EngineArgs", model: ModelConfig, parallel: ParallelConfig) -> TransferConfig | None:
    """How pages go to other replicas; None: they do not."""
    if args.kv_transfer_config is None:
        if args.kv_transfer_secret_file is not None:
            raise ConfigError("--kv-transfer-secret-file needs --kv-transfer-config")
        return None
    if model.pooling is not None:
        raise ConfigError("--kv-transfer-config: an engine that embeds lends no pages")
    if not args.kv_offload_memory_bytes:
        raise ConfigError("--kv-transfer-config: pages travel through host memory; it needs --kv-offload-memory-bytes")
    ranks, spread = parallel.world * parallel.data_parallel_size, parallel.nnodes > 1 or parallel.cores_span_nodes
    return transfer_config(args.kv_transfer_config, args.kv_transfer_secret_file, ranks, several_nodes=spread)


def _cpu_isa(args: "EngineArgs", device: Literal["cpu", "cuda"]) -> IsaName | None:
    """The instruction set that was asked for, if any."""
    if args.cpu_isa == "auto":
        return None
    if device != "cpu":
        raise ConfigError(f"--cpu-isa {args.cpu_isa} needs --device cpu")
    try:
        return choose(args.cpu_isa).name
    except ValueError as error:
        raise ConfigError(f"--cpu-isa: {error}") from None


def _depth(args: "EngineArgs", device: Literal["cpu", "cuda"], *, has_drafter: bool) -> int:
    """Plans in flight."""
    if args.pipeline_parallel_size > 1:
        return args.pipeline_parallel_size
    if device == "cuda" and has_drafter:
        if args.async_scheduling:
            raise ConfigError(
                "--async-scheduling: a draft model or a head on a device reads what a step has left before the next step; "
                "remove one of the two"
            )
        return 1
    if args.async_scheduling is not None:
        return 2 if args.async_scheduling else 1
    if device == "cuda":
        return 2
    _log.info("async scheduling: off, since on a CPU the scheduler would take the model's cores (--async-scheduling)")
    return 1


def _graphs(args: "EngineArgs", cuda: bool) -> GraphConfig:
    return graph_config(
        cuda=cuda,
        enforce_eager=args.enforce_eager,
        mode=args.cudagraph_mode,
        sizes=args.cudagraph_capture_sizes,
        largest=args.max_cudagraph_capture_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )


def _eplb(args: "EngineArgs") -> EplbConfig | None:
    ranks, experts = args.tensor_parallel_size * args.data_parallel_size, args.enable_expert_parallel
    return eplb_config(args.eplb_config, enabled=args.enable_eplb, experts=experts, ranks=ranks)


def _parallel(args: "EngineArgs", eplb: EplbConfig | None) -> ParallelConfig:
    config = ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        data_parallel_size=args.data_parallel_size,
        expert_parallel=args.enable_expert_parallel and args.tensor_parallel_size * args.data_parallel_size > 1,
        eplb=eplb,
        worker_process=args.worker_process,
        timeout=args.distributed_timeout_seconds,
        master_port=args.master_port,
        data_parallel_rpc_port=args.data_parallel_rpc_port,
    )
    cores = args.data_parallel_size_local, args.data_parallel_start_rank, args.data_parallel_address
    config = cores_placed(config, *cores, os.environ)
    # The pods of a group have cores each, or ranks of one.
    group = os.environ if config.data_parallel_size_local is None else {}
    config = placed(config, args.nnodes, args.node_rank, args.master_addr, group)
    if config.nnodes > 1 and (config.data_parallel_size > 1 or config.expert_parallel):
        flag = "--enable-expert-parallel" if config.expert_parallel else f"--data-parallel-size {args.data_parallel_size}"
        raise ConfigError(
            f"{flag} does not go with several nodes for each core (--nnodes {config.nnodes}) so far; "
            "--data-parallel-size-local distributes whole cores among nodes"
        )
    return config


def _lora(args: "EngineArgs", served_names: list[str]) -> LoraConfig | None:
    if not args.enable_lora:
        if args.lora_modules:
            raise ConfigError("--lora-modules needs --enable-lora")
        return None
    host = args.max_loras if args.max_cpu_loras is None else args.max_cpu_loras
    if host < args.max_loras:
        raise ConfigError(f"--max-cpu-loras {host} is below --max-loras {args.max_loras}: what is on the device is there too")
    modules: dict[str, LoraModule] = {}
    for given in args.lora_modules or ():
        name, separator, uri = given.partition("=")
        if not (name and separator and uri):
            raise ConfigError(f"--lora-modules {given!r} is not NAME=PATH")
        if name in modules or name in served_names:
            raise ConfigError(f"--lora-modules: the name {name!r} is taken")
        modules[name] = LoraModule(name, uri)
    return LoraConfig(
        max_loras=args.max_loras, max_cpu_loras=host, max_lora_rank=args.max_lora_rank, modules=tuple(modules.values())
    )
