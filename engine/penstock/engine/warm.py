"""`penstock warm`: compiles a model's kernels for a GPU that need not be there, as an image is built. Light to import."""

import argparse
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.config import EngineConfig
    from penstock.kernels.compile_only import CompiledKernel


def warm(argv: list[str]) -> int:
    """Compiles a model's kernels for a GPU, into the cache that serving reads.

    Returns 0, or 2 when it cannot be done as asked.
    """
    args = parser().parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stderr.write("penstock warm: TRITON_INTERPRET is set, and nothing is compiled then\n")
        return 2
    if args.cache is not None:
        cache = args.cache.expanduser().resolve()
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.stderr.write(f"penstock warm: --cache {args.cache}: {error}\n")
            return 2
        os.environ["TRITON_CACHE_DIR"] = str(cache)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from penstock.engine.args import EngineArgs
    from penstock.engine.config import ConfigError

    engine: dict[str, Any] = {name: getattr(args, name) for name in EngineArgs.__struct_fields__ if hasattr(args, name)}
    engine["load_format"] = "dummy"
    try:
        found = compile_kernels(EngineArgs(**engine).config("cuda"), args.arch)
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"penstock warm: {error}\n")
        return 2
    _show(found, args.arch)
    return 0


def compile_kernels(config: "EngineConfig", arch: str) -> "list[CompiledKernel]":
    """Every variant that serving launches, compiled or found in the cache; with a bar on a terminal.

    Raises:
        ValueError: An unknown architecture.
    """
    from rich.console import Console
    from rich.progress import Progress

    from penstock.engine.runner.device.warm import MetaRunner, launch_all, shapes
    from penstock.kernels.compile_only import compile_only

    scheduler = config.scheduler
    total = len(list(shapes(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)))
    with compile_only(arch) as compiled, Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("steps", total=total)
        runner = MetaRunner(config, arch)
        runner.load()
        runner.initialize_kv_cache(1)
        for shape in launch_all(runner):
            bar.update(task, advance=1, description=f"{shape.decodes} decodes, prompt {shape.prompt}: {len(compiled)} kernels")
    return compiled


def parser() -> argparse.ArgumentParser:
    """The flags that decide what is compiled are those of `penstock serve`."""
    from penstock.engine.cli import add_engine_flags, add_lora_flags

    found = argparse.ArgumentParser(
        prog="penstock warm",
        description="Compiles the kernels that serving a model launches, for a GPU that need not be there. "
        "Give it the flags that `penstock serve` gets.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("model", metavar="MODEL", help="a folder with config.json: weights are not needed")
    found.add_argument("--arch", default="sm_90", help="of the GPU: sm_90 is Hopper")
    found.add_argument("--cache", type=Path, metavar="FOLDER", help="Triton's cache (None: TRITON_CACHE_DIR, or ~/.triton/cache)")
    add_engine_flags(found)
    add_lora_flags(found)
    return found


def _show(kernels: "list[CompiledKernel]", arch: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "variants", "registers", "stack", "shared memory", title=f"Compiled for {arch}")
    usage = [(kernel.name, *kernel.usage(), kernel.shared) for kernel in kernels]
    for name, count in sorted(Counter(name for name, *_ in usage).items()):
        registers, stack, shared = (max(row[column] for row in usage if row[0] == name) for column in (1, 2, 3))
        table.add_row(name, str(count), str(registers), str(stack), f"{shared:,}")
    console = Console()
    console.print(table)
    cached = sum(kernel.cached for kernel in kernels)
    console.print(f"{len(kernels) - cached} compiled, {cached} were in the cache", markup=False)
