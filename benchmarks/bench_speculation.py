"""What drafts from earlier text gain on a CPU: tokens a CPU second with each method, over those without drafts.

    make bench-speculation
    make bench-speculation ARGS=--quick

The demo model answers questions about Python's standard library, so many at a time. Four workloads: prompts that hold their
answer already (echo), questions that the engine has answered before, new questions, and new questions sampled at temperature 1.
Each method has a core of its own in this process.
The cores take turns, several times over, and what counts is the ratio to the core without drafts in the same turn: a machine that
others use too slows all alike. Answers must be equal, token by token. At the end it judges the gates of `GATES`.
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import write_results
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams

MODEL = Path(__file__).parents[1] / "examples/models/penstock-tiny"
METHODS = (None, "ngram", "suffix")
STREAMS = (1, 4, 16, 32)
WORKLOADS = ("echo", "asked before", "new", "new, sampled")
GATES = (("echo", "ngram", (1,), 1.8), ("new, sampled", "ngram", STREAMS, 0.98), ("new, sampled", "suffix", STREAMS, 0.98))
"""Workload, method, numbers of streams, and the least ratio to no drafts, by the median of the rounds."""
MODULES = ("json", "os.path", "itertools", "functools", "collections", "re", "math", "random", "shutil", "statistics", "textwrap")
ROUNDS, QUICK_ROUNDS = 5, 2
QUESTIONS, QUICK_QUESTIONS = 32, 16
OUTPUT = 64
BOS, EOS = "<|bos|>", "<|eot|>"
Row = dict[str, Any]


def questions() -> Iterator[str]:
    """A question about each public function of some modules, for ever."""
    phrasings = ("What does {} do?", "Explain {}.", "Tell me about {}.", "{}", "How do I use {}?", "Describe {} please.")
    names = [
        f"{name}.{member}"
        for name in MODULES
        for member, value in inspect.getmembers(import_module(name))
        if not member.startswith("_") and callable(value)
    ]
    for phrasing in phrasings:
        for name in names:
            yield phrasing.format(name)


class Engine:
    """A core turned by hand.

    Args:
        method: Of speculative decoding; None: none.
    """

    def __init__(self, method: str | None) -> None:
        config = EngineArgs(model=str(MODEL), kv_cache_memory_bytes=2**26, max_num_seqs=64, spec_method=method).config()
        executor, blocks = build_executor(config)
        self._core = build_core(config, executor, blocks, epoch=1)
        self._eos = config.model.eos_token_ids
        self._added = 0
        self._seen = (0, 0)

    def answer(self, prompts: list[list[int]], streams: int, temperature: float) -> tuple[list[list[int]], float]:
        """Answers prompts, so many at a time; the answers, and the CPU seconds that they took."""
        answers: dict[int, list[int]] = {}
        waiting, running, first = list(enumerate(prompts)), 0, self._added
        began = time.process_time()
        while waiting or running:
            while waiting and running < streams:
                number, prompt = waiting.pop(0)
                self._add(first + number, prompt, number, temperature)
                answers[first + number] = []
                running += 1
            frame = self._core.step()
            self._core.take_events()
            if frame is None:
                continue
            offsets, ids = np.frombuffer(frame.offsets, np.int32), np.frombuffer(frame.token_ids, np.int32)
            for at, index in enumerate(np.frombuffer(frame.indexes, np.int64).tolist()):
                answers[index] += ids[offsets[at] : offsets[at + 1]].tolist()
            running -= len(frame.finished)
        return list(answers.values()), time.process_time() - began

    def _add(self, index: int, prompt: list[int], seed: int, temperature: float) -> None:
        self._added = max(self._added, index + 1)
        sampling = SamplingParams(max_tokens=OUTPUT, temperature=temperature, seed=seed, stop_token_ids=self._eos)
        self._core.handle(AddRequest(index, str(index), prompt, sampling, time.time(), cache_salt=str(index)))

    def take_accepted(self) -> float:
        """Share of drafts accepted since the last call."""
        step = self._core.stats().step
        if step is None or step.drafts is None:
            return 0.0
        now = (sum(step.drafts.accepted), sum(step.drafts.drafted))
        (accepted, drafted), self._seen = (at - before for at, before in zip(now, self._seen, strict=True)), now
        return accepted / max(drafted, 1)


def prompts(count: int, source: Iterator[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The next questions as the model's chat template has them."""
    asked = (next(source) for _ in range(count))
    return [tokenizer.encode(f"{BOS}<|user|>{text}{EOS}<|assistant|>", add_special_tokens=False).ids for text in asked]


def measure(rounds: int, count: int) -> list[Row]:
    """A row for each workload, number of streams and method."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    engines = {method: Engine(method) for method in METHODS}
    source = questions()
    known = prompts(count, source, tokenizer)
    answers = next(iter([engine.answer(known, 16, 0.0)[0] for engine in engines.values()]))
    echo = [[*prompt, *answer, *prompt] for prompt, answer in zip(known, answers, strict=True)]
    sources = {"echo": echo, "asked before": known}
    return [
        row
        for workload in WORKLOADS
        for streams in STREAMS
        for row in _compare(
            engines,
            # Each round has questions of its own, but for those that have been answered.
            [sources.get(workload) or prompts(count, source, tokenizer) for _ in range(rounds)],
            streams,
            1.0 if workload == "new, sampled" else 0.0,
            workload,
        )
    ]


def _compare(
    engines: dict[str | None, Engine], asked: list[list[list[int]]], streams: int, temperature: float, workload: str
) -> Iterator[Row]:
    rates: dict[str | None, list[float]] = {method: [] for method in engines}
    for part in asked:
        answers: list[list[list[int]]] = []
        for method, engine in engines.items():
            found, seconds = engine.answer(part, streams, temperature)
            answers.append(found)
            rates[method].append(sum(map(len, found)) / seconds)
        assert all(found == answers[0] for found in answers), "drafts change answers"
    for method, engine in engines.items():
        ratios = [rate / base for rate, base in zip(rates[method], rates[None], strict=True)]
        yield {
            "workload": workload,
            "streams": streams,
            "method": method or "none",
            "tok_per_cpu_s": round(statistics.median(rates[method]), 1),
            "of_none": round(statistics.median(ratios), 3),
            "of_none_min": round(min(ratios), 3),
            "of_none_max": round(max(ratios), 3),
            "accepted": round(engine.take_accepted(), 3),
        }


def judge(rows: list[Row]) -> list[Row]:
    """Each gate, what was found, and whether it holds."""
    found: list[Row] = []
    for workload, method, streams, least in GATES:
        for row in rows:
            if (row["workload"], row["method"]) == (workload, method) and row["streams"] in streams:
                ratio = row["of_none"]
                gate = {"workload": workload, "method": method, "streams": row["streams"], "least": least, "of_none": ratio}
                found.append({**gate, "holds": ratio >= least})
    return found


def show(rows: list[Row], console: Console) -> None:
    """The table."""
    title = f"speculative decoding: penstock-tiny, bf16, up to {OUTPUT} tokens out"
    columns = ("workload", "streams", "method", "tok_per_cpu_s", "of_none", "of_none_min", "of_none_max", "accepted")
    table = Table("workload", "streams", "drafts", "tok/cpu-s", "÷ none", "least", "most", "accepted", title=title)
    for row in rows:
        table.add_row(*(str(row[key]) for key in columns))
    console.print(table)


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {QUICK_QUESTIONS}; writes no JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    rounds, count = (QUICK_ROUNDS, QUICK_QUESTIONS) if args.quick else (ROUNDS, QUESTIONS)
    rows = measure(rounds, count)
    show(rows, console)
    gates = judge(rows)
    for gate in gates:
        word = "holds" if gate["holds"] else "FAILS"
        console.print(
            f"{word}: {gate['workload']}, {gate['streams']} streams, {gate['method']}: {gate['of_none']} ≥ {gate['least']}"
        )
    if not args.quick:
        path = write_results(
            "speculation", {"output": OUTPUT, "rounds": rounds, "questions": count, "gates": gates, "rows": rows}
        )
        console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
