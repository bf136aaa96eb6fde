"""What weights in fewer bits save and cost, on this CPU.

    make bench-quantization
    make bench-quantization ARGS=--quick

Speed: a Llama of 0.4 billion random weights, far more than the last-level cache holds, decodes with each scheme. The schemes
take turns in one process, so that a machine that others use too slows all alike; a ratio is of CPU time a token within a round.
Two gates hold for one stream: weights of eight bits decode at least 1.6 times as fast as bfloat16, of four bits 2.2 times.

Quality: with each scheme, the demo model's perplexity of the greedy answers that it gives in bfloat16, and the share of these
answers' tokens that come before the first difference.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafting.workloads import MODEL, prompts, questions
from report import write_results
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.frontend.python.offline import LLM
from penstock.engine.frontend.python.params import SamplingParams as PythonParams
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams

SCHEMES = (None, "int8_per_channel_weight_only", "int8_per_group_32", "int4_per_group_32")
GATES = {"int8_per_channel_weight_only": 1.6, "int8_per_group_32": 1.6, "int4_per_group_32": 2.2}
STREAMS, PROMPT = (1, 4, 16), 16
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


class Engine:
    """A core turned by hand.

    Args:
        folder: The model's.
        scheme: Of `--quantization`.
    """

    def __init__(self, folder: Path, scheme: str | None) -> None:
        flags: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "quantization": scheme}
        config = EngineArgs(model=str(folder), kv_cache_memory_bytes=2**26, max_num_seqs=max(STREAMS), **flags).config("cpu")
        executor, blocks = build_executor(config)
        self._core, self._added = build_core(config, executor, blocks, epoch=1), 0
        cost = config.model.cost
        assert cost is not None
        self.layer_bytes = cost.layer_weight_bytes

    def decode(self, streams: int, output: int) -> float:
        """CPU seconds a token, prompts aside."""
        sampling, first = SamplingParams(max_tokens=output, temperature=0.0), self._added
        for number in range(first, first + streams):
            prompt = np.random.default_rng(number).integers(0, SHAPE["vocab_size"], PROMPT).tolist()
            self._core.handle(AddRequest(number, str(number), prompt, sampling, time.time(), cache_salt=str(number)))
        self._added += streams
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


def speed(rounds: int, output: int) -> list[dict[str, Any]]:
    """A row for each scheme and number of streams."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(SHAPE))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (path / name).write_bytes((MODEL / name).read_bytes())
        engines = {scheme: Engine(path, scheme) for scheme in SCHEMES}
        rows: list[dict[str, Any]] = []
        for streams in STREAMS:
            times: dict[str | None, list[float]] = {scheme: [] for scheme in SCHEMES}
            for number in range(rounds + 1):
                for scheme in SCHEMES if number % 2 else SCHEMES[::-1]:
                    taken = engines[scheme].decode(streams, output)
                    if number:  # the first round warms the caches
                        times[scheme].append(taken)
            for scheme in SCHEMES:
                ratios = [plain / own for plain, own in zip(times[None], times[scheme], strict=True)]
                rows.append(
                    {
                        "scheme": scheme or "bfloat16",
                        "streams": streams,
                        "bytes of bfloat16": round(engines[scheme].layer_bytes / engines[None].layer_bytes, 3),
                        "cpu ms a token": round(1e3 * statistics.median(times[scheme]), 3),
                        "speed": round(statistics.median(ratios), 2),
                        "rounds": [round(ratio, 2) for ratio in ratios],
                        "gate": GATES.get(scheme or "") if streams == 1 else None,
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
        rows.append({"scheme": scheme or "bfloat16", "perplexity": round(perplexity, 4), "agreed share": round(agreed, 3)})
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
    show("Decoding, against bfloat16", speeds)
    qualities = quality(2 if quick else ANSWERS)
    show(f"The demo model; {ANSWERS} answers of {ANSWER} tokens at most", qualities)
    passed = {row["scheme"]: row["speed"] >= row["gate"] for row in speeds if row["gate"] is not None}
    for scheme, well in passed.items():
        Console().print(f"{scheme}: {'passed' if well else 'MISSED'} (gate {GATES[scheme]})")
    if not quick:
        print(write_results("quantization", {"speed": speeds, "quality": qualities, "passed": passed}))


if __name__ == "__main__":
    main()
