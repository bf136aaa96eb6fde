"""`penstock plan`: which layouts of a model on devices are possible, and what each can reach. Light to import."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.flag_values import number, positive

if TYPE_CHECKING:
    from penstock.engine.config import EngineConfig
    from penstock.engine.models.config import DecoderConfig
    from penstock.engine.planner.planner import Device, Estimate, Refusal

GIB: Final = 1 << 30


class _Kind(NamedTuple):
    """A device by its maker's datasheet."""

    memory: float
    """GiB."""
    bandwidth: float
    """GB/s of its memory."""
    compute: float
    """TFLOP/s of matrix products in bfloat16, without sparsity."""


KINDS: Final = {
    "a100": _Kind(80, 2039, 312),
    "h100": _Kind(80, 3350, 989),
    "h200": _Kind(141e9 / GIB, 4800, 989),
    "l4": _Kind(24, 300, 121),
    "l40s": _Kind(48, 864, 362),
}
"""NVIDIA's datasheets of the SXM or PCIe modules: A100 80GB SXM, H100 SXM, H200 SXM, L4, L40S."""


def plan(argv: list[str]) -> int:
    """Says how a model fits on devices, and what to expect of each layout; needs its config.json alone.

    Returns 0, 1 where no layout fits, or 2 where that cannot be said.
    """
    args = parser().parse_args(argv)
    from penstock.engine.config import ConfigError
    from penstock.engine.planner.planner import Estimate, best, estimate, layouts
    from penstock.engine.spec.checkpoint import DraftCheckpoint

    try:
        engine, config = _engine(args)
        device, context = _device(args), args.context or min(engine.model.max_model_len, 4096)
        if context > engine.model.max_model_len:
            raise ConfigError(f"--context {context} is above --max-model-len {engine.model.max_model_len}")
        if args.num_redundant_experts and config.experts is None:
            raise ConfigError(f"--num-redundant-experts {args.num_redundant_experts}: the model has no experts")
        drafter = DraftCheckpoint.read(engine.speculative, engine.model)
        told = [
            estimate(engine, config, it, device, context, args.num_redundant_experts if it.expert else 0, drafter)
            for it in layouts(config, args.devices, expert=True)
        ]
    except ConfigError as error:
        sys.stderr.write(f"penstock plan: {error}\n")
        return 2
    found = best([it for it in told if isinstance(it, Estimate)])
    refused = [it for it in told if not isinstance(it, Estimate)]
    if args.json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.encode({"layouts": found, "impossible": refused}) + b"\n")
    else:
        _show(found, refused, engine, device, args.devices, context)
    return 0 if found else 1


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        prog="penstock plan",
        description="Says how a model fits on devices. It needs no device and no weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = found.add_argument
    add("model", metavar="MODEL", help="a folder with config.json, a config.json, or a model as for penstock serve")
    add("--devices", type=positive, required=True, help="number of devices")
    add("--device-kind", choices=sorted(KINDS), default="h100", help="datasheet for what the next three leave out")
    add("--device-memory", type=_above_zero, metavar="GIB", help="memory of a device (None: the datasheet's)")
    add("--device-bandwidth", type=_above_zero, metavar="GB/S", help="speed of its memory (None: the datasheet's)")
    add("--device-compute", type=_above_zero, metavar="TFLOP/S", help="speed of its matrix products (None: the datasheet's)")
    add("--exchange-us", type=_above_zero, default=10.0, metavar="US", help="microseconds of one all-reduce or all-to-all")
    add("--gpu-memory-utilization", type=_share, default=0.9, help="share of the memory for weights, steps and KV cache together")
    add("--context", type=positive, metavar="TOKENS", help="average tokens of a sequence (None: 4096, or --max-model-len)")
    add("--num-redundant-experts", type=int, default=0, metavar="COPIES", help="copies of busy experts, with expert parallelism")
    add("--json", action="store_true", help="write JSON instead of a table")
    add("--revision", help="branch, tag or commit of a model from hf:// (None: main)")
    add("--dtype", choices=["auto", "bfloat16", "float32", "float16"], default="auto", help="number type; auto: the checkpoint's")
    kinds = ["auto", "bfloat16", "float32", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"]
    add(
        "--kv-cache-dtype",
        choices=kinds,
        default="auto",
        help="number type of the KV cache; auto: that of the weights; fp8 is fp8_e4m3",
    )
    add("--max-model-len", type=positive, help="longest sequence that must fit (None: the checkpoint's)")
    add("--max-num-seqs", type=positive, default=256, help="largest number of sequences in a step")
    add("--max-num-batched-tokens", type=positive, default=2048, help="largest number of tokens in a step")
    add("--block-size", type=positive, default=16, help="tokens in a KV block")
    add("--spec-method", metavar="METHOD", help="draft_model, eagle, eagle3, mtp or auto (None: the checkpoints tell)")
    add("--spec-model", metavar="MODEL", help="draft model or EAGLE head, as for penstock serve")
    add("--spec-tokens", type=positive, help="largest number of draft tokens of a request in a step (None: 4)")
    return found


def _above_zero(text: str) -> float:
    return number(text, 0, float("inf"), above=True)


def _share(text: str) -> float:
    return number(text, 0, 1, above=True)


def _engine(args: argparse.Namespace) -> "tuple[EngineConfig, DecoderConfig]":
    """The engine's settings as `penstock serve` would have them, without a look at weights."""
    from penstock.engine.config import CacheConfig, ConfigError, EngineConfig, ModelConfig, SchedulerConfig
    from penstock.engine.loading.checkpoint import resolve, stored_dtype
    from penstock.engine.loading.json_files import read_object
    from penstock.engine.models.config import parse_decoder_config
    from penstock.engine.models.cost import model_cost
    from penstock.engine.quant.parse.config import parse_quantization
    from penstock.engine.spec.settings import speculative_config

    if args.num_redundant_experts < 0:
        raise ConfigError(f"--num-redundant-experts {args.num_redundant_experts} is below 0")
    file = Path(args.model)
    if not file.is_file():
        file = resolve(args.model, args.revision) / "config.json"
        if not file.is_file():
            raise ConfigError(f"{args.model} has no config.json: it is not a model in Hugging Face's format")
    raw = read_object(file)
    config, quantization = parse_decoder_config(raw), parse_quantization(raw)
    longest, dtype = config.max_position_embeddings, stored_dtype(raw) if args.dtype == "auto" else args.dtype
    if args.max_model_len is not None and not 2 <= args.max_model_len <= longest:
        raise ConfigError(f"--max-model-len {args.max_model_len}: the checkpoint is made for 2 to {longest} tokens")
    kv_dtype = {"auto": dtype, "fp8": "fp8_e4m3"}.get(args.kv_cache_dtype, args.kv_cache_dtype)
    model = ModelConfig(
        path=file.parent,
        served_names=(args.model,),
        architecture=raw["architectures"][0],
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=args.max_model_len or longest,
        eos_token_ids=(),
        cost=model_cost(config, dtype, kv_dtype, quantization),
        load_format="dummy",  # there may be no weights to look at
        stored_quantization=quantization,
    )
    engine = EngineConfig(
        model=model,
        cache=CacheConfig(block_size=args.block_size, memory_utilization=args.gpu_memory_utilization),
        scheduler=SchedulerConfig(max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens),
        speculative=speculative_config(None, args.spec_method, args.spec_tokens, args.spec_model, model),
        device="cuda",
    )
    return engine, config


def _device(args: argparse.Namespace) -> "Device":
    from penstock.engine.planner.planner import Device
    from penstock.engine.roofline import Ceilings

    kind = KINDS[args.device_kind]
    bandwidth, compute = args.device_bandwidth or kind.bandwidth, args.device_compute or kind.compute
    memory = round((args.device_memory or kind.memory) * GIB)
    return Device(memory, Ceilings(bytes_per_s=1e9 * bandwidth, flops_per_s=1e12 * compute), 1e-6 * args.exchange_us)


def _show(
    found: "list[Estimate]", refused: "list[Refusal]", engine: "EngineConfig", device: "Device", devices: int, context: int
) -> None:
    from rich.console import Console
    from rich.table import Table

    model, console = engine.model, Console(width=None if sys.stdout.isatty() else 140)
    said = f"{model.architecture} in {model.dtype}, {model.quantization_name} quantization"
    sizes = f"{devices} devices of {device.memory_bytes / GIB:.0f} GiB, sequences of {context:,} tokens"
    console.print(f"{said}; {sizes}", highlight=False)
    if found:
        table = Table("layout", box=None)
        for title in ("weights", "KV tokens", "concurrent", "tokens/s", "ms/token", "alone", "bound by"):
            table.add_column(title, justify="right")
        for it in found:
            table.add_row(
                str(it.parallelism),
                f"{it.weight_bytes / GIB:.1f} GiB",
                f"{it.kv_tokens:,}",
                f"{it.max_concurrent:,}",
                f"{it.tokens_per_s:,.0f}",
                f"{1000 * it.token_s:.2f}",
                f"{1000 * it.lone_token_s:.2f}",
                it.bound,
            )
        console.print(table)
    for it in refused:
        console.print(f"{it.parallelism}: impossible: {it.problem}", highlight=False, soft_wrap=True)
    console.print("Weights and KV tokens are of one rank and one replica. Speeds are bounds: no engine reaches them.")
