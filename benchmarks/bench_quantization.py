"""What weights in fewer bits save and cost, on this CPU.

    make bench-quantization
    make bench-quantization ARGS=--quick

Speed: a Llama of 0.4 billion random weights decodes with each scheme, and reads a prompt. The schemes take turns in one process,
so that a machine that others use too slows all alike; a ratio is of CPU time a token within a round. W8A8 rounds its inputs to
eight bits too. It runs twice: with whole numbers, and as on a GPU, where rounded inputs are multiplied in bfloat16. Two gates
hold for one stream: weights of eight bits decode at least 1.6 times as fast as bfloat16, of four bits 2.2 times.

Quality: with each scheme, the demo model's perplexity of the greedy answers that it gives in bfloat16, and the share of these
answers' tokens that come before the first difference.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from drafting.workloads import MODEL, prompts, questions
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
STREAMS, PROMPT, LONG_PROMPT = (1, 4, 16), 16, 512
OUTPUT, QUICK_OUTPUT = 24, 8
ROUNDS, QUICK_ROUNDS = 7, 2
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
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
        config = EngineArgs(kv_cache_memory_bytes=2**26, max_num_seqs=max(STREAMS), **flags).config("cpu")

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


def speed(rounds: int, output: int) -> list[dict[str, Any]]:
    """A row for each scheme and kind of work."""
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        engines = {arm: Engine(Path(folder), arm) for arm in ARMS}
    works = {f"{streams} streams": partial(Engine.decode, streams=streams, output=output) for streams in STREAMS}
    works[f"prompt of {LONG_PROMPT}"] = Engine.prefill
    rows: list[dict[str, Any]] = []
    for work, run in works.items():
        times: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(rounds + 1):
            for arm in ARMS if number % 2 else ARMS[::-1]:
                taken = run(engines[arm])
                if number:  # the first round warms the caches
                    times[arm].append(taken)
        for arm in ARMS:
            ratios = [plain / own for plain, own in zip(times[PLAIN], times[arm], strict=True)]
            rows.append(
                {
                    "scheme": arm,
                    "work": work,
                    "bytes of bfloat16": round(engines[arm].layer_bytes / engines[PLAIN].layer_bytes, 3),
                    "cpu ms a token": round(1e3 * statistics.median(times[arm]), 3),
                    "speed": round(statistics.median(ratios), 2),
                    "rounds": [round(ratio, 2) for ratio in ratios],
                    "gate": GATES.get(arm) if work == f"{STREAMS[0]} streams" else None,
                }
            )
    return rows


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
    speeds = speed(QUICK_ROUNDS if quick else ROUNDS, QUICK_OUTPUT if quick else OUTPUT)
    show("Decoding and prompts, against bfloat16", speeds)
    qualities = quality(2 if quick else ANSWERS)
    show(f"The demo model; {ANSWERS} answers of {ANSWER} tokens at most", qualities)
    passed = {row["scheme"]: row["speed"] >= row["gate"] for row in speeds if row["gate"] is not None}
    for scheme, well in passed.items():
        Console().print(f"{scheme}: {'passed' if well else 'MISSED'} (gate {GATES[scheme]})")
    if not quick:
        print(write_results("quantization", {"speed": speeds, "quality": qualities, "passed": passed}))


if __name__ == "__main__":
    main()
