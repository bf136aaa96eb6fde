"""What weights in fewer bits save and cost, on this CPU.

    make bench-quantization
    make bench-quantization ARGS=--quick

Speed: a Llama of 0.5 billion random weights decodes with each scheme, and reads a prompt. In eight bits it has 0.5 GB, more than
last-level caches hold. The schemes take turns, so that a machine that others use too slows all alike; a ratio is of CPU time a
token within a round. W8A8 rounds its inputs to eight bits too. It runs twice: with whole numbers, and as on a GPU, where rounded
inputs are multiplied in bfloat16. Gates hold for one stream: weights of eight bits decode at least 1.6 times as fast as bfloat16,
of four bits 2.2 times.

Where `make bench-peers ARGS=llama-cpp` has installed it, llama.cpp takes turns too, with the same shape in Q8_0 and Q4_0. It
rounds inputs to eight bits, so W8A8 must decode at least 0.9 times as fast; other schemes are reported beside it.

Quality: with each scheme, the demo model's perplexity of the greedy answers that it gives in bfloat16, and the share of these
answers' tokens that come before the first difference.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from drafting.workloads import MODEL, prompts, questions
from peers.llama_bench import LlamaBench, llama_bench
from report import write_results
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.frontend.python.offline import LLM
from penstock.engine.frontend.python.params import SamplingParams as PythonParams
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams
from penstock.kernels.ops import Ops, ops_for

SCHEMES = (None, "int8_per_channel_weight_only", "int8_per_group_32", "int4_per_group_32")
PLAIN, W8A8, WIDENED = "bfloat16", "W8A8", "W8A8, multiplied in bfloat16"
ARMS = (PLAIN, *filter(None, SCHEMES), W8A8, WIDENED)
GATES = {"int8_per_channel_weight_only": 1.6, "int8_per_group_32": 1.6, W8A8: 1.6, "int4_per_group_32": 2.2}
PEER_OF = {
    "int8_per_channel_weight_only": "llama.cpp Q8_0",
    "int8_per_group_32": "llama.cpp Q8_0",
    W8A8: "llama.cpp Q8_0",
    "int4_per_group_32": "llama.cpp Q4_0",
}
PEER_GATES = {W8A8: 0.9}
STREAMS, PROMPT = (1, 4, 16), 16
ROUNDS = {"1 stream": 5, "4 streams": 2, "16 streams": 2, "prompt": 2}
OUTPUT, LONG_PROMPT = 16, 128
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
SHAPE = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
ANSWERS, ANSWER = 64, 64
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


class Engine:
    """A core turned by hand.

    Args:
        folder: With a folder for each kind of checkpoint.
        arm: Of ARMS.
    """

    def __init__(self, folder: Path, arm: str) -> None:
        stored = arm in (W8A8, WIDENED)
        flags: dict[str, Any] = {"dtype": "bfloat16", "quantization": arm if arm in SCHEMES else None}
        flags |= {"model": str(folder / (W8A8 if stored else PLAIN)), "load_format": "auto" if stored else "dummy"}
        config = EngineArgs(kv_cache_memory_bytes=2**27, max_num_seqs=max(STREAMS), **flags).config("cpu")

        def ops(*args: Any) -> Ops:
            return replace(found := ops_for(*args), integer_linear=None if arm == WIDENED else found.integer_linear)

        with mock.patch("penstock.engine.runner.model_runner.ops_for", ops):
            executor, blocks = build_executor(config)
        self._core, self._added = build_core(config, executor, blocks, epoch=1), 0
        cost = config.model.cost
        assert cost is not None
        self.layer_bytes = cost.layer_weight_bytes

    def prefill(self) -> float:
        """CPU seconds a token of a long prompt."""
        self._add(1, LONG_PROMPT, 1)
        start, frame = time.process_time(), None
        while frame is None or not len(frame.finished):
            frame = self._core.step()
            self._core.take_events()
        return (time.process_time() - start) / LONG_PROMPT

    def _add(self, streams: int, length: int, output: int) -> None:
        sampling, first = SamplingParams(max_tokens=output, temperature=0.0), self._added
        for number in range(first, first + streams):
            prompt = np.random.default_rng(number).integers(0, SHAPE["vocab_size"], length).tolist()
            self._core.handle(AddRequest(number, str(number), prompt, sampling, time.time(), cache_salt=str(number)))
        self._added += streams

    def decode(self, streams: int, output: int) -> float:
        """CPU seconds a token, prompts aside."""
        self._add(streams, PROMPT, output)
        running, tokens, start = streams, 0, None
        while running:
            frame = self._core.step()
            self._core.take_events()
            if frame is None:
                continue
            if start is not None:
                tokens += len(np.frombuffer(frame.token_ids, np.int32))
            elif frame.token_ids:
                start = time.process_time()
            running -= len(frame.finished)
        assert start is not None
        return (time.process_time() - start) / tokens


def write_models(folder: Path) -> None:
    """One folder for weights that are made up while loading, and one with weights of eight bits."""
    for name, more in ((PLAIN, {}), (W8A8, {"quantization_config": W8A8_CONFIG})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(SHAPE | more))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name / file).write_bytes((MODEL / file).read_bytes())
    hidden, inner, vocab = (SHAPE[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
    layers = {f"self_attn.{name}_proj": (rows, hidden) for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))}
    layers |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors = {f"{name}.weight": torch.randn(vocab, hidden).bfloat16() / 50 for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    for layer in range(SHAPE["num_hidden_layers"]):
        of_layer = f"model.layers.{layer}"
        for name, (rows, columns) in layers.items():
            tensors[f"{of_layer}.{name}.weight"] = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
            tensors[f"{of_layer}.{name}.weight_scale"] = torch.full((rows, 1), 2e-4).bfloat16()
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{of_layer}.{name}.weight"] = torch.ones(hidden).bfloat16()
    save_file(tensors, folder / W8A8 / "model.safetensors")


def peers() -> tuple[dict[str, LlamaBench], dict[str, str]]:
    """Those that are there, and why others are not."""
    found = {name: llama_bench(SIZES, name.rpartition(" ")[2]) for name in sorted(set(PEER_OF.values()))}
    there = {name: peer for name, peer in found.items() if not isinstance(peer, str)}
    return there, {name: peer for name, peer in found.items() if isinstance(peer, str)}


def speed(quick: bool, others: Mapping[str, LlamaBench]) -> list[dict[str, Any]]:
    """A row for each scheme and kind of work."""
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        engines = {arm: Engine(Path(folder), arm) for arm in ARMS}
    rows: list[dict[str, Any]] = []
    for work, rounds in ROUNDS.items():
        streams = int(work.partition(" ")[0]) if work != "prompt" else 0
        runs: dict[str, Callable[[], float]] = {
            arm: partial(engine.decode, streams, OUTPUT) if streams else engine.prefill for arm, engine in engines.items()
        }
        if streams == 1:
            runs |= {name: partial(peer.decode, OUTPUT) for name, peer in others.items()}
        times = in_turns(runs, 1 if quick else rounds)
        for arm in runs:
            peer = PEER_OF.get(arm, "")
            rows.append(
                {
                    "scheme": arm,
                    "work": work,
                    "bytes": round(engines[arm].layer_bytes / engines[PLAIN].layer_bytes, 3) if arm in engines else None,
                    "cpu ms a token": round(1e3 * statistics.median(times[arm]), 3),
                    "speed": ratio(times[PLAIN], times[arm]),
                    "gate": GATES.get(arm) if streams == 1 else None,
                    "over llama.cpp": ratio(times[peer], times[arm]) if peer in times else None,
                    "peer gate": PEER_GATES.get(arm) if streams == 1 and peer in times else None,
                    "rounds": {name: [round(1e3 * one, 3) for one in times[name]] for name in (PLAIN, arm)},
                }
            )
    return rows


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each gives in each round; a round before them, which warms the caches, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            taken = runs[name]()
            if number:
                times[name].append(taken)
    return times


def ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """By what factor `own` is faster: the median of the rounds."""
    return round(statistics.median(other / mine for other, mine in zip(others, own, strict=True)), 2)


def quality(answers: int) -> list[dict[str, Any]]:
    """A row for each scheme."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    asked, rows, expected = prompts(answers, questions(), tokenizer), list[dict[str, Any]](), list[list[int]]()
    for scheme in SCHEMES:
        with LLM(str(MODEL), in_process=True, dtype="bfloat16", quantization=scheme, kv_cache_memory_bytes=2**27) as model:
            outputs = model.generate(asked, PythonParams(max_tokens=ANSWER, temperature=0.0), progress=False)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            expected = expected or found
            texts = [prompt + answer for prompt, answer in zip(asked, expected, strict=True)]
            scored = model.generate(texts, PythonParams(max_tokens=1, prompt_logprobs=0), progress=False)
        logprobs = [
            place[token].logprob
            for prompt, text, output in zip(asked, texts, scored, strict=True)
            for token, place in list(zip(text, output.prompt_logprobs or (), strict=True))[len(prompt) :]
            if place is not None
        ]
        agreed = sum(_common(*pair) for pair in zip(found, expected, strict=True)) / sum(map(len, expected))
        perplexity = math.exp(-sum(logprobs) / len(logprobs))
        rows.append({"scheme": scheme or PLAIN, "perplexity": round(perplexity, 4), "agreed share": round(agreed, 3)})
    return rows


def _common(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints a table."""
    names = [name for name in rows[0] if name != "rounds"]
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in names))
    Console().print(table)


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written")
    quick: bool = parser.parse_args().quick
    torch.set_num_threads(1)
    others, absent = peers()
    speeds = speed(quick, others)
    show("Decoding and prompts, against bfloat16", speeds)
    for name, why in absent.items():
        Console().print(f"{name}: {why}")
    qualities = quality(2 if quick else ANSWERS)
    show(f"The demo model; {ANSWERS} answers of {ANSWER} tokens at most", qualities)
    passed: dict[str, bool] = {}
    for figure, gate, beside in (("speed", "gate", PLAIN), ("over llama.cpp", "peer gate", "llama.cpp")):
        for row in speeds:
            if row[gate] is not None:
                name = f"{row['scheme']} over {beside}"
                passed[name] = row[figure] >= row[gate]
                Console().print(f"{name}: {'passed' if passed[name] else 'MISSED'} ({row[figure]}, gate {row[gate]})")
    if not quick:
        print(write_results("quantization", {"speed": speeds, "quality": qualities, "absent": absent, "passed": passed}))


if __name__ == "__main__":
    main()
