"""What LoRA adapters cost a batch on a CPU: tokens a CPU second with 0, 1, 4 and 8 of them among its requests.

    make bench-lora
    make bench-lora ARGS=--quick

The model is the random Llama of 12.6 M parameters of `make bench-engine`; each adapter has rank 16 on every projection. So many
requests run at a time, 128 tokens in and 64 out, and go round the adapters. Two cores are in this process: one that serves no
adapters, and one with slots for all of them. The rows are measured in turn, several times over, and what counts is the ratio to
the core without adapters in the same round: a machine that others use too slows both alike.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peers.loop import OUTPUT, PROMPT, closed_loop
from peers.model import make_model
from report import write_results
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.lora.peft import MODULES
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams

ADAPTERS = (0, 1, 4, 8)
STREAMS = 8
RANK = 16
ROUNDS, QUICK_ROUNDS = 7, 2
SECONDS, QUICK_SECONDS = 3.0, 0.5
Row = dict[str, Any]


def make_adapter(folder: Path, model: Path, rank: int, seed: int) -> Path:
    """Writes a random adapter on every projection of a checkpoint, in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(model / "model.safetensors", "pt") as checkpoint:
        for name in checkpoint.keys():  # noqa: SIM118 - it is no dict
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in MODULES:
                out_features, in_features = checkpoint.get_slice(name).get_shape()
                prefix = f"base_model.model.{layer}"
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * 0.02
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * 0.02
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Engine:
    """A core turned by hand; see `peers.loop.Engine`.

    Args:
        model: The checkpoint.
        adapters: Folders of those that it shall serve.
    """

    def __init__(self, model: Path, adapters: Sequence[Path] = ()) -> None:
        modules = [f"a{at}={folder}" for at, folder in enumerate(adapters)]
        flags: dict[str, Any] = (
            {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": RANK, "lora_modules": modules} if adapters else {}
        )
        config = EngineArgs(model=str(model), kv_cache_memory_bytes=2**26, **flags).config()
        executor, blocks = build_executor(config)
        self._core = build_core(config, executor, blocks, epoch=1)
        if config.lora is not None:
            self._core.load_adapters(config.lora.modules)
        self._ids = [info.lora_id for info in self._core.adapters()]
        self._tokens: dict[int, int] = {}
        self._added = 0
        self.mixed = 0
        """How many of the adapters requests go round; 0: they have none."""

    def add(self, number: int, prompt: list[int], tokens: int) -> None:
        """A request of so many random tokens that generates exactly so many."""
        self._added += 1  # numbers begin again with each measurement
        lora_id = self._ids[number % self.mixed] if self.mixed else 0
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        request = AddRequest(
            index=self._added,
            request_id=str(self._added),
            prompt_token_ids=prompt,
            sampling=sampling,
            arrival_time=time.time(),
            lora_id=lora_id,
            cache_salt=str(self._added),  # the prompts of a round are those of the last
        )
        self._core.handle(request)
        self._tokens[self._added] = tokens

    def step(self) -> list[tuple[int, int]]:
        """Turns the core once."""
        frame = self._core.step()
        self._core.take_events()
        return [] if frame is None else [(end.index, self._tokens.pop(end.index)) for end in frame.finished]

    def close(self) -> None:
        """Nothing to end."""


def measure(model: Path, folder: Path, mixes: Sequence[int], rounds: int, seconds: float, streams: int) -> list[Row]:
    """A row for the core without adapters and one for each number of them: medians over the rounds."""
    adapters = [make_adapter(folder / str(at), model, RANK, at) for at in range(max(mixes))]
    plain, serving = Engine(model), Engine(model, adapters)
    rates: dict[int | None, list[float]] = {}
    for at in range(-1, rounds):  # the first warms up
        for mixed in (None, *mixes):
            engine = plain if mixed is None else serving
            engine.mixed = mixed or 0
            row = closed_loop(engine, streams, seconds if at >= 0 else 0.01)
            if at >= 0:
                rates.setdefault(mixed, []).append(row["tok_per_cpu_s"])
    rows: list[Row] = []
    for mixed, found in rates.items():
        ratios = [rate / base for rate, base in zip(found, rates[None], strict=True)]
        rows.append(
            {
                "adapters": mixed,
                "tok_per_cpu_s": round(statistics.median(found), 1),
                "of_base": round(statistics.median(ratios), 3),
                "of_base_min": round(min(ratios), 3),
                "of_base_max": round(max(ratios), 3),
            }
        )
    return rows


def show(rows: list[Row], streams: int, console: Console) -> None:
    """The table."""
    title = f"LoRA: {streams} streams, rank {RANK} on all projections; 12.6 M Llama, bf16, {PROMPT} in, {OUTPUT} out"
    table = Table("adapters in the batch", "tok/cpu-s", "÷ without LoRA", "least", "most", title=title)
    for row in rows:
        name = "served without --enable-lora" if row["adapters"] is None else str(row["adapters"])
        table.add_row(name, *(str(row[key]) for key in ("tok_per_cpu_s", "of_base", "of_base_min", "of_base_max")))
    console.print(table)


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--adapters", type=int, nargs="+", default=ADAPTERS, metavar="N", help=f"(default: {ADAPTERS})")
    parser.add_argument("--streams", type=int, default=STREAMS, help=f"requests at a time (default: {STREAMS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {QUICK_SECONDS} s; writes no JSON")
    args = parser.parse_args()
    if max(args.adapters) < 1 or min(args.adapters) < 0:
        parser.error("--adapters are numbers from 0 on, and one is above")
    torch.set_num_threads(1)
    console = Console()
    rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if args.quick else (ROUNDS, SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(make_model(), Path(folder), args.adapters, rounds, seconds, args.streams)
    show(rows, args.streams, console)
    if args.quick:
        return 0
    settings = {"streams": args.streams, "rank": RANK, "prompt": PROMPT, "output": OUTPUT, "rounds": rounds}
    path = write_results("lora", {**settings, "rows": rows})
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
