"""What a mixture of experts costs on a CPU: decoding beside others, and the share of routing and sorting in a step.

    make bench-experts
    make bench-experts ARGS=--quick

The model is a random Qwen3-MoE in bfloat16 with 32 experts, of which a token takes four. All sides have one thread, and take
turns. Each decodes so many requests at a time; what counts is tokens a second of CPU time after the prompts, as the median of the
rounds. transformers runs its own default for experts. llama.cpp runs where `make bench-peers ARGS=llama-cpp` has installed it.

Routing and sorting is what a layer does beside its products: the router, the choice, and bringing tokens to their experts and
back. The last is measured by running the kernel over the same choices with experts of two inner features, so it is a little too
much. The gate is 10 % of a step.

Experts of few bits are measured by themselves: one layer of the same sizes, with all experts in one kernel, with one expert after
the other, and in bfloat16, in turns.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.llama_bench import LlamaBatchedBench, llama_batched_bench
from peers.model import TOKENIZER
from report import write_results
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams
from penstock.kernels.experts.routing import Routing
from penstock.kernels.experts.table import ExpertTable, PackedExpertTable, PackedLayer
from penstock.kernels.linear.reference import pack_weight
from penstock.kernels.ops import ops_for
from penstock.kernels.quantized_linear.reference import Quantizable, pack_quantized, pair_up, quantize

BATCHES = (1, 8, 32)
PROMPT, OUTPUT = 32, 33
ROUNDS, QUICK_ROUNDS = 5, 1
CALLS, QUICK_CALLS = 300, 30
SHARE_GATE = 0.10
PACKED: dict[str, tuple[Quantizable, int | None]] = {"int8 by output": ("int8", None), "int4 in groups of 32": ("int4", 32)}
HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS = 768, 384, 32, 4, 6
SIZES = {
    "vocab_size": 4096,
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * INNER,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "norm_topk_prob": True,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def make_model(folder: Path) -> None:
    """Writes the checkpoint."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, eos_token_id=None, bos_token_id=None))
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # without one there is no GGUF file
        shutil.copy(TOKENIZER / file, folder)


class Ours:
    """A core turned by hand."""

    def __init__(self, model: Path) -> None:
        config = EngineArgs(model=str(model), kv_cache_memory_bytes=2**27, max_num_seqs=64, enable_prefix_caching=False).config()
        executor, blocks = build_executor(config)
        self._core = build_core(config, executor, blocks, epoch=1)
        self._added = 0

    def decode(self, prompts: list[list[int]]) -> float:
        """Tokens a CPU second in the steps after each request's first token."""
        sampling, began = SamplingParams(max_tokens=OUTPUT, temperature=0.0), None
        for number, prompt in enumerate(prompts, self._added):
            self._core.handle(AddRequest(number, str(number), prompt, sampling, time.time()))
        self._added += len(prompts)
        running, given, before = len(prompts), 0, 0
        while running:
            frame = self._core.step()
            self._core.take_events()
            assert frame is not None
            given += len(np.frombuffer(frame.token_ids, np.int32))
            if began is None and given >= len(prompts):
                began, before = time.process_time(), given
            running -= len(frame.finished)
        assert began is not None
        return (given - before) / (time.process_time() - began)


class Theirs:
    """transformers with a KV cache."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]]) -> float:
        """As ours."""
        found = self._model(torch.tensor(prompts), use_cache=True)
        began = time.process_time()
        for _ in range(OUTPUT - 1):
            tokens = found.logits[:, -1:].argmax(-1)
            found = self._model(tokens, past_key_values=found.past_key_values, use_cache=True)
        return len(prompts) * (OUTPUT - 1) / (time.process_time() - began)


class LlamaCpp:
    """llama.cpp, whose own benchmark draws its prompts."""

    def __init__(self, bench: LlamaBatchedBench) -> None:
        self._bench = bench

    def decode(self, prompts: list[list[int]]) -> float:
        """As ours."""
        return self._bench.decode(len(prompts), PROMPT, OUTPUT)


def routing_seconds(batch: int, calls: int) -> float:
    """Of all layers of a step: the router, the choice, and the way to the experts and back."""
    ops = ops_for("cpu", torch.bfloat16)
    if ops.linear is None or ops.experts is None:
        raise SystemExit("bench-experts: there is no compiled kernel here")
    linear, experts = ops.linear, ops.experts
    x, gate = torch.randn(batch, HIDDEN).bfloat16(), pack_weight(torch.randn(EXPERTS, HIDDEN).bfloat16() / 20)
    narrow = [[pack_weight(torch.randn(*size).bfloat16()) for _ in range(EXPERTS)] for size in ((4, HIDDEN), (HIDDEN, 2))]
    table, rule = ExpertTable(narrow[0], narrow[1], HIDDEN, 2, "silu"), Routing(CHOSEN, renormalise=True)

    def once() -> None:
        experts(x, *ops.route(linear(x, gate, None, EXPERTS), None, rule), table)

    return LAYERS * _median_seconds(once, calls)


def packed_seconds(batch: int, calls: int) -> dict[str, Any]:
    """One layer of experts in bfloat16 and in few bits, as one kernel and one after the other; by scheme."""
    ops = ops_for("cpu", torch.bfloat16)
    experts, packed_experts = ops.experts, ops.packed_experts
    assert experts is not None and packed_experts is not None, "`routing_seconds` found the kernels"
    shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    wide = [[pack_weight(torch.randn(*shape).bfloat16() / 20) for _ in range(EXPERTS)] for shape in shapes]
    plain = ExpertTable(wide[0], wide[1], HIDDEN, INNER, "silu")
    x, weights = torch.randn(batch, HIDDEN).bfloat16(), torch.rand(batch, CHOSEN)
    ids = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(batch)]).int()
    found = dict[str, Any]()
    for scheme, (number, group) in PACKED.items():
        layers = [[_packed(*shape, number, group) for _ in range(EXPERTS)] for shape in shapes]
        table = PackedExpertTable(layers[0], layers[1], HIDDEN, INNER, "silu")

        def mlp(rows: torch.Tensor, first: PackedLayer, last: PackedLayer) -> torch.Tensor:
            return ops.quantized_linear(ops.silu_mul(ops.quantized_linear(rows, first.weight, None)), last.weight, None)

        mlps = [partial(mlp, first=first, last=last) for first, last in zip(*layers, strict=True)]
        ways: dict[str, Callable[[], object]] = {
            "bfloat16": partial(experts, x, ids, weights, plain),
            "one kernel": partial(packed_experts, x, ids, weights, table),
            "one by one": partial(ops.any_experts, x, ids, weights, mlps),
        }
        seconds = dict.fromkeys(ways, 0.0)
        for _ in range(3):
            seconds = {name: seconds[name] + _median_seconds(way, calls // 3) / 3 for name, way in ways.items()}
        found[scheme] = {name: round(1e6 * value) for name, value in seconds.items()} | {
            "one kernel is faster than one by one": round(seconds["one by one"] / seconds["one kernel"], 2),
            "one kernel is faster than bfloat16": round(seconds["bfloat16"] / seconds["one kernel"], 2),
        }
    return found


def _packed(outputs: int, inputs: int, number: Quantizable, group: int | None) -> PackedLayer:
    """A random layer of few bits."""
    values, scales = quantize(torch.randn(outputs, inputs) / 20, number, group or inputs, torch.bfloat16)
    return PackedLayer(pack_quantized(pair_up(values, number), scales, None, number, group or inputs, inputs))


def _median_seconds(call: Callable[[], object], calls: int) -> float:
    times: list[float] = []
    for _ in range(calls):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def measure(model: Path, rounds: int, calls: int) -> dict[str, Any]:
    """The figures of all batches."""
    sides: dict[str, Ours | Theirs | LlamaCpp] = {"penstock": Ours(model), "transformers": Theirs(model)}
    bench = llama_batched_bench(model)
    if isinstance(bench, str):
        print(f"llama.cpp is left out: {bench}")
    else:
        sides["llama.cpp"] = LlamaCpp(bench)
    generator, found = np.random.default_rng(0), dict[str, Any]()
    for batch in BATCHES:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):  # the first one warms up
            prompts = generator.integers(0, SIZES["vocab_size"], (batch, PROMPT)).tolist()
            for name in sorted(sides, reverse=bool(number % 2)):
                rate = sides[name].decode(prompts)
                if number:
                    rates[name].append(rate)
        ratios = {
            name: [ours / theirs for ours, theirs in zip(rates["penstock"], of, strict=True)]
            for name, of in rates.items()
            if name != "penstock"
        }
        step = batch / statistics.median(rates["penstock"])
        found[str(batch)] = {
            "tokens a cpu second": {name: round(statistics.median(of), 1) for name, of in rates.items()},
            "ratio": {
                name: {"median": round(statistics.median(of), 2), "rounds": [round(ratio, 2) for ratio in of]}
                for name, of in ratios.items()
            },
            "share of routing and sorting": round(routing_seconds(batch, calls) / step, 4),
            "microseconds of a layer in few bits": packed_seconds(batch, calls),
        }
    passed = all(of["share of routing and sorting"] <= SHARE_GATE for of in found.values())
    return {"model": SIZES, "batches": found, "gate of the share": SHARE_GATE, "passed": passed}


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round; nothing is written")
    torch.set_num_threads(1)
    quick: bool = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "checkpoint"
        make_model(model)
        results = measure(model, QUICK_ROUNDS if quick else ROUNDS, QUICK_CALLS if quick else CALLS)
    print(json.dumps(results, indent=2))
    if not quick:
        print(write_results("experts", results))


if __name__ == "__main__":
    main()
