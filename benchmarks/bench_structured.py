"""What grammars cost a full batch, and what a new schema costs the first token, on the demo model.

    make bench-structured
    make bench-structured ARGS=--quick
    make bench-structured ARGS="--schemas schemas.jsonl"

Two gates. With 32 requests at a time whose answers follow a grammar, a token takes at most 1.05 times as long as without; the
tokens of both sides are as many, since the grammar lets the answer go on. And the first token of a request with a schema that the
engine has never seen comes at most 20 ms later at the 99th percentile than one without a schema. The sides take turns in one
process, so that a machine that others use too slows both alike. The first gate holds for wall time and for
CPU time: on a busy machine wall time alone may hide the cost. What llguidance alone takes for the same answers, a mask and a
token taken in for each, with caches as cold as a forward pass leaves them, tells how much of the cost is the engine's.

A file of schemas, as `bench_schemas.py` takes it, adds what an engine is asked for in earnest: requests of which each has another
schema, many of whose tokens are forced. One that ends makes place for the next; the side without grammars gives as many tokens
for each.
"""

import argparse
import json
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from drafting.side import freeze_heap, tokens_of
from drafting.workloads import MODEL, prompts, questions
from report import write_results
from tokenizers import Tokenizer

from penstock.engine.args import EngineArgs
from penstock.engine.core.grammar.guidance import Guidance
from penstock.engine.core.ipc.process import READ_POLL_MS, build_core, build_executor
from penstock.engine.grammar import Grammar
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams

STREAMS, OUTPUT = 32, 64
OF_FILE, LONG = 128, 128
"""Schemas of a file that are served, and tokens of an answer at most. The engine keeps more grammars than that."""
PASS_BYTES = 2**23
"""What a forward pass of the demo model reads and writes, about."""
ROUNDS, QUICK_ROUNDS = 40, 2
COLD, QUICK_COLD = 200, 30
ITL_GATE, TTFT_GATE_MS = 1.05, 20.0
TEXT = Grammar("json_schema", '{"type": "array", "items": {"type": "string"}, "minItems": 64}', "bench")
"""The model chooses nearly every token, so that forced tokens do not hide what masks cost."""


class Engine:
    """A core turned by hand."""

    def __init__(self) -> None:
        config = EngineArgs(model=str(MODEL), kv_cache_memory_bytes=2**26, max_num_seqs=64).config()
        executor, blocks = build_executor(config)
        self._core = build_core(config, executor, blocks, epoch=1)
        self._matcher = Guidance(config.model).compile(TEXT).matcher
        self._eos_token_ids = config.model.eos_token_ids
        self._added = 0

    def answer(
        self, asked: list[list[int]], grammars: list[Grammar | None], outputs: list[int], streams: int | None = None
    ) -> dict[str, Any]:
        """Answers all at once, or so many at a time: seconds to the first token of any; wall and CPU seconds, tokens and steps
        from there on; all ids; and which requests failed, and why."""
        first, waiting = self._added, deque[AddRequest]()
        for number, (prompt, grammar, output) in enumerate(zip(asked, grammars, outputs, strict=True), first):
            stops = () if grammar is None else self._eos_token_ids
            sampling = SamplingParams(max_tokens=output, temperature=1.0, seed=number, stop_token_ids=stops)
            waiting.append(
                AddRequest(number, str(number), prompt, sampling, time.time(), cache_salt=str(number), grammar=grammar)
            )
        self._added += len(asked)
        frames: list[Any] = []
        failed: dict[int, str] = {}
        running, tokens, began, start = 0, 0, time.perf_counter(), None
        while running or waiting:
            while waiting and (streams is None or running < streams):
                self._core.handle(waiting.popleft())
                running += 1
            frame = self._core.step()
            self._core.take_events()
            if frame is None:
                time.sleep(READ_POLL_MS / 1000)  # As the engine's process waits for a grammar that is being compiled.
                continue
            failed |= {end.index - first: end.error for end in frame.finished if end.error is not None}
            frames.append(frame)
            if start is None and frame.token_ids:
                start = time.perf_counter(), time.process_time()
            elif start is not None:
                tokens += len(np.frombuffer(frame.token_ids, np.int32))
            running -= len(frame.finished)
        assert start is not None
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        ids: list[list[int]] = [[] for _ in asked]
        for frame in frames:
            for index, given in tokens_of(frame):
                ids[index - first].extend(given)
        taken = {"wall": wall, "cpu": cpu, "tokens": tokens, "steps": len(frames), "ttft": start[0] - began}
        return taken | {"ids": ids, "failed": failed}

    def library_us(self, answers: list[list[int]]) -> float:
        """CPU time in which llguidance alone makes the masks of answers of one length, and takes in their tokens: µs a token."""
        matchers = [self._matcher.copy() for _ in answers]
        masks = np.empty((len(answers), matchers[0].num_words), np.int32)
        addresses, size = [row.ctypes.data for row in masks], masks.strides[0]
        took, memory = 0.0, np.zeros(PASS_BYTES, np.uint8)
        for tokens in zip(*answers, strict=True):
            memory += 1
            began = time.process_time()
            for matcher, address in zip(matchers, addresses, strict=True):
                matcher.compute(address, size)
            for matcher, token in zip(matchers, tokens, strict=True):
                matcher.accept(token)
            took += time.process_time() - began
        if failed := [error for matcher in matchers if (error := matcher.error) is not None]:
            raise RuntimeError(f"llguidance does not allow an answer that it has allowed: {failed[0]}")
        return 1e6 * took / sum(map(len, answers))


def schema(number: int) -> Grammar:
    """One of its own for each number, of some properties of several types."""
    properties = {
        f"name_{number}": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["mill", "weir", f"sluice {number}"]},
        "head": {"type": "number", "minimum": 0, "maximum": number + 10},
        "parts": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
    }
    return Grammar("json_schema", json.dumps({"type": "object", "properties": properties, "required": ["kind"]}), "bench")


class Sides(NamedTuple):
    """What tokens took with grammars and without, round by round."""

    ratios: dict[str, list[float]]
    """By clock: with as multiples of without."""
    token_us: dict[str, list[float]]
    """CPU time of a token by side, and llguidance's part."""


def take_turns(engine: Engine, streams: int, rounds: int, source: Any, tokenizer: Tokenizer) -> Sides:
    """Answers so many requests at a time with a grammar and without."""
    for grammar in (None, TEXT):  # Loads the tokenizer, compiles the grammar and warms the kernels.
        engine.answer(prompts(streams, source, tokenizer), [grammar] * streams, [OUTPUT] * streams)
    freeze_heap()
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    token_us: dict[str, list[float]] = {"free": [], "masked": [], "llguidance alone": []}
    for number in range(rounds):
        asked, found = prompts(streams, source, tokenizer), {}
        for side in ("free", "masked") if number % 2 else ("masked", "free"):
            found[side] = engine.answer(asked, [TEXT if side == "masked" else None] * streams, [OUTPUT] * streams)
            if found[side]["failed"]:
                raise RuntimeError(f"requests failed: {found[side]['failed']}")
            token_us[side].append(1e6 * found[side]["cpu"] / found[side]["tokens"])
        token_us["llguidance alone"].append(engine.library_us(found["masked"]["ids"]))
        for clock, of in ratios.items():
            of.append(found["masked"][clock] / found["masked"]["tokens"] * found["free"]["tokens"] / found["free"][clock])
    return Sides(ratios, token_us)


def of_file(engine: Engine, path: Path, streams: int, rounds: int, source: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """So many requests at a time, each with another schema of a file: what they take as multiples of those without grammars."""
    lines = path.read_text().splitlines()[:OF_FILE]
    grammars = [Grammar("json_schema", json.dumps(json.loads(line)["schema"]), "bench") for line in lines]
    # The library refuses some schemas, and the limits of some show within an answer alone.
    failed = engine.answer(prompts(len(grammars), source, tokenizer), [*grammars], [LONG] * len(grammars), streams)["failed"]
    grammars = [grammar for number, grammar in enumerate(grammars) if number not in failed]
    freeze_heap()
    found: dict[str, list[float]] = {"wall": [], "cpu": [], "steps": []}
    group = max(2 * streams, 4)
    for _ in range(rounds):
        taken = {side: dict.fromkeys(found, 0.0) for side in ("masked", "free")}
        # In small groups, so that what others do to the machine meanwhile falls on both sides alike.
        for first in range(0, len(grammars), group):
            some = grammars[first : first + group]
            asked = prompts(len(some), source, tokenizer)
            masked = engine.answer(asked, [*some], [LONG] * len(asked), streams)
            free = engine.answer(asked, [None] * len(asked), [len(ids) for ids in masked["ids"]], streams)
            for side, of in (("masked", masked), ("free", free)):
                for what in found:
                    taken[side][what] += of[what]
        for what, of in found.items():
            of.append(taken["masked"][what] / taken["free"][what])
    ratios = {what: round(statistics.median(of), 3) for what, of in found.items()}
    return ratios | {
        "schemas": len(grammars),
        "refused": failed,
        "rounds by cpu time": [round(ratio, 3) for ratio in found["cpu"]],
    }


def measure(rounds: int, cold: int, schemas: Path | None) -> dict[str, Any]:
    """Both gates' figures."""
    tokenizer, source = Tokenizer.from_file(str(MODEL / "tokenizer.json")), questions()
    engine = Engine()
    one, many = (take_turns(engine, streams, rounds, source, tokenizer) for streams in (1, STREAMS))
    firsts: dict[str, list[float]] = {"free": [], "cold": []}
    for number in range(cold):
        for side in ("free", "cold"):
            [prompt] = prompts(1, source, tokenizer)
            firsts[side].append(1e3 * engine.answer([prompt], [schema(number) if side == "cold" else None], [1])["ttft"])
    itl, by_cpu = (statistics.median(of) for of in many.ratios.values())
    served = {}
    if schemas is not None:
        turns = max(rounds // 8, 1)
        served = {f"{streams} at a time": of_file(engine, schemas, streams, turns, source, tokenizer) for streams in (1, STREAMS)}
    p99 = {side: round(float(np.percentile(times, 99)), 2) for side, times in firsts.items()}
    return {
        "itl ratio": {"median": round(itl, 3), "rounds": [round(ratio, 3) for ratio in many.ratios["wall"]], "gate": ITL_GATE},
        "itl ratio by cpu time": round(by_cpu, 3),
        "cpu us a token": {side: round(statistics.median(times), 1) for side, times in many.token_us.items()},
        "cpu us a token, one request": {side: round(statistics.median(times), 1) for side, times in one.token_us.items()},
        "ttft ms, p50": {side: round(statistics.median(times), 2) for side, times in firsts.items()},
        "ttft ms, p99": {**p99, "gate": TTFT_GATE_MS},
        "schemas of a file, as multiples of none": served,
        "passed": {"itl": max(itl, by_cpu) <= ITL_GATE, "cold ttft": p99["cold"] - p99["free"] <= TTFT_GATE_MS},
    }


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written")
    parser.add_argument("--schemas", type=Path, metavar="FILE", help="serve these schemas too: as of bench-schemas")
    torch.set_num_threads(1)
    args = parser.parse_args()
    quick: bool = args.quick
    results = measure(QUICK_ROUNDS if quick else ROUNDS, QUICK_COLD if quick else COLD, args.schemas)
    print(json.dumps(results, indent=2))
    if not quick:
        print(write_results("structured", results))


if __name__ == "__main__":
    main()
