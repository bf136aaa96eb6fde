"""What a KV page in the host's memory or on a disk is worth: the second turn of a prompt, loaded or computed.

    make bench-kv
    make bench-kv ARGS=--quick
    make bench-kv ARGS="--only decodes"

A prompt is sent, other prompts push it out of the KV cache (and for the disk out of the host's memory too), and the prompt is
sent again with another last token. The table has the milliseconds to the first token of that second turn: computed by an engine
without tiers, loaded always, and by the engine's own choice (`--kv-offload-loads cost`). The gate: the choice takes at most a
tenth more than the better of the two, or half a millisecond. "Quick disk" is a file system in memory, whose loads pay from some
length on: the length at which both take the same time is compared with the one that the engine's own costs say, and the gate is
20 %. All engines run in one process, a length at a time in turn, on one thread.

A second table has what 100 MB of pages on their way do to three requests that decode: the mean time of a step meanwhile, over
that of the same steps without a load (as far into the answers), or of an engine without a tier (stores). The gate is 1.05.

A third table has the bytes a second of each transport between two replicas of one machine (`kv_transports`).
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import kv_transports
import torch
import transformers
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.engine.args import EngineArgs
from penstock.engine.connectors.load_costs import LoadCosts
from penstock.engine.core.ipc.process import READ_POLL_MS, build_core, build_executor
from penstock.engine.messages import AbortRequests, AddRequest, StepOutputs
from penstock.engine.sampling import SamplingParams
from penstock.engine.stats import OffloadStats

LENGTHS = (16, 32, 64, 128, 256, 1024, 2048)
TIERS = ("memory", "disk", "quick disk")
LONGEST, BLOCK = max(LENGTHS), 16
ROOM = LONGEST + LONGEST // 4
"""Tokens in the KV cache where nobody decodes, and in the host's memory where the disk is measured."""
HEADS, WIDE, LAYERS = 6, 32, 6
"""Attention heads of the model, and of one whose pages of `LONGEST` tokens have 100 MB."""
DECODERS, DECODED = 3, 100
ROUNDS, QUICK_ROUNDS = 3, 1
PULLS, QUICK_PULLS = 50, 5
GATE, SLACK_S, EVEN_GATE, DECODE_GATE = 1.1, 5e-4, 0.2, 1.05
DISK_BYTES = 2**32
PATIENCE_S = 60.0


def save_model(folder: Path, heads: int = HEADS) -> None:
    """A random Llama in bf16, of 12 M parameters with six heads."""
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": LAYERS, "head_dim": 64}
    positions = {"vocab_size": 8000, "max_position_embeddings": 2 * LONGEST, "eos_token_id": None}
    config = transformers.LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads, **shape, **positions)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def token_bytes(heads: int) -> int:
    """Of the KV cache."""
    return 2 * heads * 64 * 2 * LAYERS


class Engine:
    """A core turned by hand.

    Args:
        model: The checkpoint.
        host_tokens: Tokens whose pages fit into the host's memory.
        heads: Of the checkpoint.
        room: Tokens in the KV cache.
        settings: More arguments of the engine.
    """

    def __init__(self, model: Path, host_tokens: int, heads: int = HEADS, room: int = ROOM, **settings: Any) -> None:
        args: dict[str, Any] = {
            "model": str(model),
            "device": "cpu",
            "num_gpu_blocks_override": room // BLOCK,
            "max_num_batched_tokens": 1024,
        }
        args["max_model_len"] = LONGEST + BLOCK
        settings |= {"kv_offload_memory_bytes": host_tokens * token_bytes(heads), "max_num_seqs": DECODERS + 1}
        config = EngineArgs(**args, **settings).config()
        executor, found = build_executor(config)
        self._core = build_core(config, executor, found, epoch=1)
        self._added, self._ended = 0, set[int]()

    def _turn(self) -> StepOutputs | None:
        """A step, and the pause that the core's process makes where it only waits for pages: their threads need the time."""
        frame = self._core.step()
        if not self._core.has_work:
            time.sleep(READ_POLL_MS / 1000)
        return frame

    def add(self, tokens: list[int], max_tokens: int = 1) -> int:
        """Adds a request and returns its number."""
        self._added += 1
        self._core.handle(AddRequest(self._added, "", tokens, SamplingParams(max_tokens=max_tokens), time.time()))
        return self._added

    def steps(self, until: Callable[[], bool]) -> list[float]:
        """The seconds of each step until something is so."""
        seconds, before = list[float](), time.perf_counter()
        while not until():
            frame = self._turn()
            self._ended |= {it.index for it in frame.finished} if frame is not None else set()
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        return seconds

    def ended(self, request: int) -> bool:
        """Whether a request has ended in one of the `steps`."""
        return request in self._ended

    def stop(self, *requests: int) -> None:
        """Aborts them."""
        self._core.handle(AbortRequests(list(requests)))

    def ttft(self, tokens: list[int]) -> float:
        """Seconds to the first token."""
        began = time.perf_counter()
        self.add(tokens)
        while (frame := self._turn()) is None or not frame.finished:
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
            self._turn()

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

    def saved_s(self, tokens: int) -> float:
        """Seconds that a load of so many tokens saves, by its own costs: all of a prompt but the last."""
        saved_s = self._core._meter.saved_s(0, tokens, 1)  # pyright: ignore[reportPrivateUsage]
        assert saved_s is not None
        return saved_s

    def costs(self) -> LoadCosts:
        """What it has learned of loads."""
        assert self._core._offload is not None  # pyright: ignore[reportPrivateUsage]
        return self._core._offload._costs  # pyright: ignore[reportPrivateUsage]

    @property
    def loaded_pages(self) -> int:
        """From the host's memory, in all."""
        offload = self._core._offload  # pyright: ignore[reportPrivateUsage]
        return 0 if offload is None else offload._loaded  # pyright: ignore[reportPrivateUsage]

    def close(self) -> None:
        """Ends it."""
        self._core.close()


def measure(rounds: int) -> dict[str, Any]:
    """The times of second turns."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as quick:
        model = Path(name) / "model"
        save_model(model)
        engines = {"computed": Engine(model, 0)}
        for tier in TIERS:
            for loads in ("always", "cost"):
                tokens, disk = 40 * LONGEST, dict[str, Any]()
                if tier != "memory":
                    folder = f"{name if tier == 'disk' else quick}/{loads}"
                    tokens, disk = ROOM, {"kv_offload_directory": folder, "kv_offload_disk_bytes": DISK_BYTES}
                engines[f"{tier}, {loads}"] = Engine(model, tokens, kv_offload_loads=loads, **disk)
        times: dict[str, dict[int, list[float]]] = {name: {length: [] for length in LENGTHS} for name in engines}
        with Console(stderr=True).status("measuring") as status:
            for seed in range(rounds + 1):  # the first round warms caches, and teaches the costs
                for length in LENGTHS:
                    status.update(f"round {seed} of {rounds}, {length} tokens")
                    for name, engine in engines.items():
                        seconds = engine.second_turn(length, seed * LONGEST + length)
                        times[name][length] += [seconds] if seed else []
        rates = {tier: _bytes_per_s(engines[f"{tier}, always"], tier) for tier in TIERS}
        foretold = {tier: _foretold(engines[f"{tier}, cost"], tier) for tier in TIERS}
        for engine in engines.values():
            engine.close()
    milliseconds = {name: {n: round(1e3 * statistics.median(of), 2) for n, of in by.items()} for name, by in times.items()}
    missed = [
        f"{tier}, {n} tokens"
        for tier in TIERS
        for n in LENGTHS
        if milliseconds[f"{tier}, cost"][n]
        > GATE * min(milliseconds["computed"][n], milliseconds[f"{tier}, always"][n]) + 1e3 * SLACK_S
    ]
    even = {tier: {"measured": _even(milliseconds, tier), "foretold": foretold[tier]} for tier in TIERS}
    return {"rounds": rounds, "ttft_ms": milliseconds, "load_bytes_per_s": rates, "even_tokens": even, "missed": missed}


def _bytes_per_s(engine: Engine, tier: str) -> float:
    tiers = engine.tiers
    assert tiers is not None
    found = tiers.memory if tier == "memory" else tiers.lower["disk"]
    assert found is not None
    return round(found.loaded_bytes / found.load_s)


def _even(milliseconds: dict[str, dict[int, float]], tier: str) -> float | None:
    """Tokens from which on loading is quicker, between the lengths measured; None: it is so from the first on, or never."""
    gains = [milliseconds["computed"][n] - milliseconds[f"{tier}, always"][n] for n in LENGTHS]
    for (n, before), (m, after) in pairwise(zip(LENGTHS, gains, strict=True)):
        if before < 0 <= after:
            return round(n + (m - n) * before / (before - after), 1)
    return None


def _foretold(engine: Engine, tier: str) -> float | None:
    """The same by the engine's own costs: where a load takes as long as to compute its tokens."""
    costs, now = engine.costs(), time.time()
    lines = [costs.memory.line(now)] + ([] if tier == "memory" else [costs.lower["disk"].line(now)])
    known = [line for line in lines if line is not None]
    fixed, each = sum(line[0] for line in known), sum(line[1] for line in known) / BLOCK
    pays = (n for n in range(1, LONGEST) if engine.saved_s(n) >= fixed + each * n)
    return next(pays, None) if len(known) == len(lines) else None


def measure_decodes(rounds: int) -> dict[str, Any]:
    """What loads and stores do to those who decode: mean seconds of a step meanwhile, over those without."""
    ratios: dict[str, list[float]] = {"load": [], "store": []}
    longest: dict[str, list[float]] = {"alone": [], "load": []}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        save_model(model, WIDE)
        tiered = Engine(model, 8 * LONGEST, WIDE, room=2 * LONGEST, kv_offload_loads="always")
        plain = Engine(model, 0, WIDE, room=2 * LONGEST)
        for seed in range(rounds + 1):
            drawn = torch.Generator().manual_seed(seed)
            prompt, *others = (torch.randint(0, 8000, (LONGEST - 1,), generator=drawn).tolist() for _ in range(3))
            store = [_beside_decoders(engine, prompt) for engine in (tiered, plain)]
            for other in others:
                tiered.ttft(other)
                tiered.settle()
            load = _beside_decoders(tiered, prompt)
            alone = _decoders_alone(tiered, len(load))
            if seed:
                ratios["store"].append(statistics.mean(store[0]) / statistics.mean(store[1]))
                ratios["load"].append(statistics.mean(load) / statistics.mean(alone))
                longest["alone"].append(max(alone))
                longest["load"].append(max(load))
        moved = token_bytes(WIDE) * (LONGEST - BLOCK)
        for engine in (tiered, plain):
            engine.close()
    return {
        "bytes": moved,
        "ratio": {kind: round(statistics.median(of), 3) for kind, of in ratios.items()},
        "ratios": ratios,
        "longest_step_ms": {kind: round(1e3 * statistics.median(of), 2) for kind, of in longest.items()},
        "gate": DECODE_GATE,
    }


def _beside_decoders(engine: Engine, prompt: list[int]) -> list[float]:
    """Seconds of each step from when a prompt comes until its pages are loaded, or where none are, until its own step."""
    decoders = _decoders(engine)
    last, loaded = engine.add(prompt), engine.loaded_pages
    during = engine.steps(lambda: engine.ended(last) or engine.loaded_pages > loaded)
    engine.stop(*decoders)
    engine.settle()
    return during


def _decoders_alone(engine: Engine, steps: int) -> list[float]:
    """Seconds of each of as many steps with nothing beside them: as far in their answers, since the KV that they read grows."""
    decoders, count = _decoders(engine), iter(range(steps))
    alone = engine.steps(lambda: next(count, None) is None)
    engine.stop(*decoders)
    engine.settle()
    return alone


def _decoders(engine: Engine) -> list[int]:
    """Requests that have run `DECODED` steps."""
    decoders = [engine.add([2 + at] * BLOCK, LONGEST // 4) for at in range(DECODERS)]
    count = iter(range(DECODED))
    engine.steps(lambda: next(count, None) is None)
    return decoders


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
    for tier, even in results["even_tokens"].items():
        found = f"{tier}: loads pay from {even['measured']} tokens on; by the engine's costs {even['foretold']}"
        console.print(f"{found}; the gate is {EVEN_GATE:.0%}")
    console.print(f"gate missed: {', '.join(results['missed'])}" if results["missed"] else "gate met")


def show_decodes(results: dict[str, Any]) -> None:
    """Prints what moving pages do to others."""
    title = f"{DECODERS} requests decode while {results['bytes']:,} bytes move"
    table = Table("what", "mean step, over one without", "gate", title=title)
    for kind, ratio in results["ratio"].items():
        table.add_row(kind, f"{ratio:.3f}", str(results["gate"]))
    Console(width=120).print(table)
    longest = results["longest_step_ms"]
    Console(width=120).print(f"longest step: {longest['alone']} ms alone, {longest['load']} ms during a load")


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
    parser.add_argument("--only", choices=["tiers", "decodes", "transports"], help="one of the tables (all)")
    torch.set_num_threads(1)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    rounds = QUICK_ROUNDS if given.quick else ROUNDS
    if given.only in (None, "tiers"):
        results = measure(rounds)
        show(results)
    if given.only in (None, "decodes"):
        results["decodes"] = measure_decodes(rounds)
        show_decodes(results["decodes"])
    if given.only in (None, "transports"):
        # NIXL's libnl and the system's (with libibverbs1) do not go together: a process with both may die when it exits.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            results["transports"] = child.submit(kv_transports.measure, QUICK_PULLS if given.quick else PULLS).result()
        show_transports(results["transports"])
    if not given.quick:
        print(write_results("kv" if given.only is None else f"kv-{given.only}", results))


if __name__ == "__main__":
    main()
