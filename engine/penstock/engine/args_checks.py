"""What the engine's arguments may not be, and what does not go together."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.engine.config import ConfigError, EplbConfig, ModelConfig
from penstock.engine.connectors.page_objects import bucket_and_path
from penstock.engine.connectors.store_address import store_address
from penstock.plain_errors import explained

if TYPE_CHECKING:
    from penstock.engine.args import EngineArgs


def check_types(args: "EngineArgs") -> None:
    """Check types and limits of the fields, as the flags' parser does."""
    for field in msgspec.structs.fields(type(args)):
        try:
            msgspec.convert(getattr(args, field.name), field.type)
        except msgspec.ValidationError as error:
            wrong = explained(error, field.type)
            raise ConfigError(f"{field.name}{wrong.field}: {wrong.problem}") from None


def check_ranks(
    args: "EngineArgs", eplb: EplbConfig | None, folder: Path, architecture: str, device: Literal["cpu", "cuda"]
) -> None:
    """Refuses a number of ranks among which the model cannot be divided."""
    world, stages = args.tensor_parallel_size, args.pipeline_parallel_size
    if (copies := args.data_parallel_size) > 1 and device == "cuda":
        raise ConfigError(f"--data-parallel-size {copies}: several cores run on a CPU alone so far (--device cpu)")
    if world == stages == copies == 1 and not args.enable_expert_parallel:
        return
    from penstock.engine.loading.json_files import read_object
    from penstock.engine.models.config import parse_decoder_config
    from penstock.engine.parallel.sizes import check_experts, check_sizes, check_stages

    if device == "cuda":
        flag = f"--tensor-parallel-size {world}" if world > 1 else f"--pipeline-parallel-size {stages}"
        raise ConfigError(f"{flag}: several ranks run on a CPU alone so far (--device cpu)")
    config = parse_decoder_config(read_object(folder / "config.json"))
    if args.enable_expert_parallel:
        check_experts(architecture, config, world * copies, eplb)
        _check_expert_parallel(args, stages, device)
    if world > 1:
        check_sizes(architecture, config, world, whole_experts=args.enable_expert_parallel)
    if stages > 1:
        check_stages(config, stages)
        _check_pipeline(args, stages)


def _check_expert_parallel(args: "EngineArgs", stages: int, device: Literal["cpu", "cuda"]) -> None:
    """Refuses what ranks that divide experts cannot do so far."""
    if device == "cuda":
        raise ConfigError("--enable-expert-parallel: experts are divided on a CPU alone so far (--device cpu)")
    if stages > 1 and args.data_parallel_size > 1:
        raise ConfigError(
            f"--enable-expert-parallel with --data-parallel-size {args.data_parallel_size} does not go with "
            f"--pipeline-parallel-size {stages}: cores that divide experts make one step after the other, all together"
        )
    if args.async_scheduling and args.data_parallel_size > 1:
        raise ConfigError("--async-scheduling: cores that divide experts make one step after the other, all of them together")


def _check_pipeline(args: "EngineArgs", stages: int) -> None:
    """Refuses what the stages of a pipeline cannot do."""
    if args.async_scheduling is False:
        raise ConfigError(f"--no-async-scheduling: --pipeline-parallel-size {stages} keeps a plan in flight for each stage")


def check_cache_dtype(args: "EngineArgs", model: ModelConfig, device: Literal["cpu", "cuda"]) -> None:
    """Refuses a KV cache that no kernel reads."""
    asked = args.kv_cache_dtype
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


def check_offload(args: "EngineArgs", device: Literal["cpu", "cuda"]) -> None:
    """Refuses places for pages that lack what they need."""
    if args.kv_offload_memory_bytes and device == "cuda":
        raise ConfigError("--kv-offload-memory-bytes: pages are kept on a CPU alone so far (--device cpu)")
    if args.kv_offload_memory_bytes and not args.enable_prefix_caching:
        raise ConfigError("--kv-offload-memory-bytes keeps what the prefix cache finds: it needs --enable-prefix-caching")
    folder = args.kv_offload_directory, args.kv_offload_disk_bytes
    store = args.kv_offload_store, args.kv_offload_store_bytes
    bucket = args.kv_offload_bucket, args.kv_offload_bucket_bytes
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
        if not args.kv_offload_memory_bytes:
            raise ConfigError(f"{place} keeps copies of what is in host memory: it needs --kv-offload-memory-bytes")
    if args.kv_offload_threshold and not args.kv_offload_memory_bytes:
        raise ConfigError(
            "--kv-offload-threshold says which blocks are copied to host memory: it needs --kv-offload-memory-bytes"
        )
    if args.kv_offload_store is not None:
        store_address(args.kv_offload_store)
    if args.kv_offload_bucket is not None:
        bucket_and_path(args.kv_offload_bucket)


def check_pooling(args: "EngineArgs", device: Literal["cpu", "cuda"]) -> None:
    """Refuses what an engine that embeds cannot do."""
    if device == "cuda":
        raise ConfigError("--runner pooling: this model is served for embeddings, so far on a CPU alone (--device cpu)")
    for flag, given in (
        ("--enable-lora", args.enable_lora),
        ("--speculative-config", args.speculative_config or args.spec_method or args.spec_tokens or args.spec_model),
        ("--logits-processors", args.logits_processors),
        ("--override-generation-config", args.override_generation_config),
    ):
        if given:
            raise ConfigError(f"{flag}: this model is served for embeddings, which have none (--runner generate)")


def check_whole_images(args: "EngineArgs", tokens: int, drafts: int) -> None:
    """Refuses limits under which an image might never have a step with room for all its tokens."""
    if 0 < args.long_prefill_token_threshold < tokens:
        raise ConfigError(
            f"--long-prefill-token-threshold {args.long_prefill_token_threshold}: this model reads the {tokens} tokens of an "
            f"image in one step; it must be 0, or {tokens} at least"
        )
    needed = tokens + (args.max_num_seqs - 1) * (1 + drafts)
    if args.max_num_batched_tokens < needed:
        raise ConfigError(
            f"--max-num-batched-tokens {args.max_num_batched_tokens}: this model reads the {tokens} tokens of an image in "
            f"one step, and {args.max_num_seqs - 1} other requests decode in it; it must be at least {needed}, or "
            "--max-num-seqs less"
        )
