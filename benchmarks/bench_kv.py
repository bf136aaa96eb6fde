"""What a KV page in the host's memory or on a disk is worth: the second turn of a prompt, loaded or computed.

    make bench-kv
    make bench-kv ARGS=--quick
    make bench-kv ARGS="--only transports"

A prompt is sent, other prompts push it out of the KV cache (and for the disk out of the host's memory too), and the prompt is
sent again with another last token. The table has the milliseconds to the first token of that second turn: computed by an engine
without tiers, loaded always, and by the engine's own choice (`--kv-offload-loads cost`). The gate: the choice takes at most a
tenth more than the better of the two, or half a millisecond. All engines run in one process, a length at a time in turn, on one
thread.

A second table has the bytes a second of each transport between two replicas of one machine (`kv_transports`).
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import kv_transports
import torch
import transformers
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams
from penstock.engine.stats import OffloadStats

LENGTHS = (16, 64, 256, 1024, 2048)
LONGEST, BLOCK = max(LENGTHS), 16
ROOM = LONGEST + LONGEST // 4
"""Tokens in the KV cache, and in the host's memory where the disk is measured."""
TOKEN_BYTES = 2 * 6 * 64 * 2 * 6
ROUNDS, QUICK_ROUNDS = 5, 1
PULLS, QUICK_PULLS = 50, 5
GATE, SLACK_S = 1.1, 5e-4
DISK_BYTES = 2**32
PATIENCE_S = 60.0


def save_model(folder: Path) -> None:
    """A random Llama of 12 M parameters in bf16."""
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6, "head_dim": 64}
    positions = {"vocab_size": 8000, "max_position_embeddings": 2 * LONGEST, "eos_token_id": None}
    config = transformers.LlamaConfig(num_key_value_heads=6, **shape, **positions)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class Engine:
    """A core turned by hand.

    Args:
        model: The checkpoint.
        host_tokens: Tokens whose pages fit into the host's memory.
        settings: More arguments of the engine.
    """

    def __init__(self, model: Path, host_tokens: int, **settings: Any) -> None:
        blocks = ROOM // BLOCK
        args: dict[str, Any] = {
            "model": str(model),
            "device": "cpu",
            "num_gpu_blocks_override": blocks,
            "max_num_batched_tokens": 1024,
        }
        args["max_model_len"] = LONGEST + BLOCK
        config = EngineArgs(**args, kv_offload_memory_bytes=host_tokens * TOKEN_BYTES, max_num_seqs=4, **settings).config()
        executor, found = build_executor(config)
        self._core = build_core(config, executor, found, epoch=1)
        self._added = 0

    def ttft(self, tokens: list[int]) -> float:
        """Seconds to the first token."""
        self._added += 1
        request = AddRequest(self._added, "", tokens, SamplingParams(max_tokens=1), time.time())
        began = time.perf_counter()
        self._core.handle(request)
        while (frame := self._core.step()) is None or not frame.finished:
            pass
        if frame.finished[0].error is not None:
            raise RuntimeError(f"a request failed: {frame.finished[0]}")
        return time.perf_counter() - began

    @property
    def tiers(self) -> OffloadStats | None:
        """Of its pages; None: it has no tiers."""
        return self._core.stats().offload

    def settle(self) -> None:
        """Waits until nothing is on its way to a tier."""
        deadline = time.monotonic() + PATIENCE_S
        while self._core.has_work or self._core.is_reading:
            if time.monotonic() > deadline:
                raise RuntimeError("pages are still on their way to the disk")
            self._core.step()

    def second_turn(self, length: int, seed: int) -> float:
        """Seconds to the first token of a prompt whose pages have left the KV cache."""
        drawn = torch.Generator().manual_seed(seed)
        first, *others = (torch.randint(0, 8000, (size,), generator=drawn).tolist() for size in (length, LONGEST, LONGEST // 2))
        self.ttft([*first, 1])
        self.settle()
        for other in others:
            self.ttft(other)
            self.settle()
        self.ttft([0])  # its step copies to the host's memory what the one before has computed
        self.settle()
        return self.ttft([*first, 2])

    def close(self) -> None:
        """Ends it."""
        self._core.close()


def measure(rounds: int) -> dict[str, Any]:
    """The figures of all engines."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        save_model(model)
        roomy, tight = 40 * LONGEST, ROOM
        disks = {
            loads: {"kv_offload_directory": f"{name}/{loads}", "kv_offload_disk_bytes": DISK_BYTES}
            for loads in ("always", "cost")
        }
        engines = {
            "computed": Engine(model, 0),
            "memory, always": Engine(model, roomy, kv_offload_loads="always"),
            "memory, by cost": Engine(model, roomy, kv_offload_loads="cost"),
            "disk, always": Engine(model, tight, kv_offload_loads="always", **disks["always"]),
            "disk, by cost": Engine(model, tight, kv_offload_loads="cost", **disks["cost"]),
        }
        times: dict[str, dict[int, list[float]]] = {name: {length: [] for length in LENGTHS} for name in engines}
        with Console(stderr=True).status("measuring") as status:
            for seed in range(rounds + 1):  # the first round warms caches, and teaches the costs
                for length in LENGTHS:
                    status.update(f"round {seed} of {rounds}, {length} tokens")
                    for name, engine in engines.items():
                        seconds = engine.second_turn(length, seed * LONGEST + length)
                        times[name][length] += [seconds] if seed else []
        rates = {tier: _bytes_per_s(engines[f"{tier}, always"], tier) for tier in ("memory", "disk")}
        for engine in engines.values():
            engine.close()
    milliseconds = {name: {n: round(1e3 * statistics.median(of), 2) for n, of in by.items()} for name, by in times.items()}
    missed = [
        f"{tier}, {n} tokens"
        for tier in ("memory", "disk")
        for n in LENGTHS
        if milliseconds[f"{tier}, by cost"][n]
        > GATE * min(milliseconds["computed"][n], milliseconds[f"{tier}, always"][n]) + 1e3 * SLACK_S
    ]
    return {"rounds": rounds, "ttft_ms": milliseconds, "load_bytes_per_s": rates, "missed": missed}


def _bytes_per_s(engine: Engine, tier: str) -> float:
    tiers = engine.tiers
    assert tiers is not None
    found = tiers.memory if tier == "memory" else tiers.lower["disk"]
    assert found is not None
    return round(found.loaded_bytes / found.load_s)


def show(results: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("prefix", *results["ttft_ms"], title="milliseconds to the first token of the second turn")
    for length in LENGTHS:
        table.add_row(str(length), *(f"{by[length]:.2f}" for by in results["ttft_ms"].values()))
    console = Console(width=120)
    console.print(table)
    console.print(
        "bytes a second of loads:", ", ".join(f"{tier} {rate:.2e}" for tier, rate in results["load_bytes_per_s"].items())
    )
    console.print(f"gate missed: {', '.join(results['missed'])}" if results["missed"] else "gate met")


def show_transports(rates: dict[str, Any]) -> None:
    """Prints the table of transports."""
    table = Table("transport", "GB/s", "of memcpy", title=f"{rates['pages']} scattered pages of {rates['page_bytes']:,} bytes")
    for name in ("memcpy", "shm", "nixl", "tcp"):
        rate = rates[name]
        row = ("not installed", "") if rate is None else (f"{rate / 1e9:.2f}", f"{rate / rates['memcpy']:.0%}")
        table.add_row(name, *row)
    Console(width=120).print(table)


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written")
    parser.add_argument("--only", choices=["tiers", "transports"], help="one of the two tables (both)")
    torch.set_num_threads(1)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    if given.only != "transports":
        results = measure(QUICK_ROUNDS if given.quick else ROUNDS)
        show(results)
    if given.only != "tiers":
        results["transports"] = kv_transports.measure(QUICK_PULLS if given.quick else PULLS)
        show_transports(results["transports"])
    if not given.quick:
        print(write_results("kv" if given.only is None else f"kv-{given.only}", results))


if __name__ == "__main__":
    main()
